"""Training of the shipped model: corpus, tokenizer, three stages, evaluation and model card.

``python -m dsa_jax.models.train --help`` lists the steps. Nothing here is needed to run a checkpoint.
"""
