"""Language models with DeepSeek Sparse Attention in Flax NNX: the weights, whole-sequence and paged forward passes."""
