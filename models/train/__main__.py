"""``python -m dsa_jax.models.train [corpus|train|evaluate|text|drafts|card] --data FOLDER --out FOLDER``."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

from dsa_jax.models.train import corpus, streams
from dsa_jax.models.train import tokenizer as tokenizer_

STEPS = ("train", "corpus", "evaluate", "text", "drafts", "card")


def main(arguments: list[str] | None = None) -> int:
    """Runs one step of the recipe; 2 with a message on bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        {
            "corpus": _corpus,
            "train": _train,
            "evaluate": _evaluate,
            "text": _text,
            "drafts": _drafts,
            "card": _card,
        }[options.work](options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dsa_jax.models.train",
        description="Train, judge and describe the small model that ships with the library.",
    )
    parser.add_argument(
        "work",
        nargs="?",
        default="train",
        choices=STEPS,
        help="corpus: collect the text and encode it; train (default): train, save and evaluate; "
        "evaluate: judge a checkpoint on held-out modules; text: sample continuations; "
        "drafts: count the drafts that are kept after held-out prompts; card: write CARD.md and the plot",
    )
    parser.add_argument("--data", type=Path, help="folder of corpus, tokenizer and tokens")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--preset", default="small", help="name of the configuration (default: small)")
    parser.add_argument("--minutes", type=float, help="time for all stages; their steps are cut to fit")
    parser.add_argument(
        "--epochs", type=float, default=16.0, help="of the dense stage, at most (default: 16)"
    )
    parser.add_argument(
        "--indexer-steps", type=int, default=600, help="of the indexer warm-up (default: 600)"
    )
    parser.add_argument("--sparse-epochs", type=float, default=3.0, help="of the sparse stage (default: 3)")
    parser.add_argument("--batch", type=int, default=8, help="contexts a step (default: 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens a context (default: 2048)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    parser.add_argument("--decay", type=float, default=0.5, help="weight decay (default: 0.5)")
    parser.add_argument(
        "--noise", type=float, default=0.05, help="share of input tokens replaced (default: 0.05)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="activations in float32 (default: bfloat16)")
    parser.add_argument("--state", type=Path, help="file of the resumable state (default: OUT/state.npz)")
    parser.add_argument("--resume", action="store_true", help="continue from the state")
    parser.add_argument("--stages", type=int, default=3, help="stop after so many stages (default: 3)")
    return parser


def _folder(options: argparse.Namespace, name: str) -> Path:
    folder = getattr(options, name)
    if folder is None:
        raise ValueError(f"{options.work}: --{name} is missing; want a folder: pass --{name} FOLDER")
    return folder


def _corpus(options: argparse.Namespace) -> None:
    data = _folder(options, "data")
    documents = corpus.build()
    facts = corpus.save(documents, data)
    print(json.dumps(facts, indent=1))
    training = (document.text for document in documents if corpus.split_of(document.module) == "train")
    tokenizer = tokenizer_.train(training)
    encoded = streams.encode(documents, tokenizer)
    streams.save(encoded, tokenizer, data)
    print({split: len(tokens) for split, tokens in encoded.tokens.items()}, "tokens")


def _train(options: argparse.Namespace) -> None:
    from flax import nnx

    from dsa_jax.models import checkpoint
    from dsa_jax.models.decoder import Decoder
    from dsa_jax.models.presets import preset
    from dsa_jax.models.train.loop import Trainer
    from dsa_jax.models.train.stages import recipe
    from dsa_jax.models.train.state import write_atomically
    from dsa_jax.models.train.updates import Settings

    out = _folder(options, "out")
    encoded, tokenizer = streams.load(_folder(options, "data"))
    an_epoch = len(encoded.tokens["train"]) / (options.batch * options.length)
    stages = recipe(
        steps=(int(options.epochs * an_epoch), options.indexer_steps, int(options.sparse_epochs * an_epoch)),
        rate=options.rate,
        noise=options.noise,
    )
    settings = Settings(
        stages=stages[: options.stages],
        batch=options.batch,
        length=options.length,
        seed=options.seed,
        decay=options.decay,
        bfloat16=not options.float32,
    )
    bos, eos = tokenizer_.specials(tokenizer)
    config = dataclasses.replace(
        preset(options.preset),
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=bos,
        eos_token_ids=(eos,),
    )
    model = Decoder(config, rngs=nnx.Rngs(options.seed))
    trainer = Trainer(
        model, encoded, settings, state_path=options.state or out / "state.npz", minutes=options.minutes
    )
    if options.resume:
        trainer.resume()
    trained = trainer.run()
    if trained is None:
        return
    checkpoint.save_pretrained(trained, out, tokenizer=tokenizer)
    import jax

    device = jax.devices()[0].device_kind
    record = {
        "device": device,
        "settings": trainer.facts(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trainer.arrays["params"])),
        "records": trainer.progress.log,
    }
    write_atomically(out / "training.json", (json.dumps(record, indent=1) + "\n").encode())
    manifest = corpus.load_manifest(_folder(options, "data"))
    write_atomically(out / "corpus.json", (json.dumps(manifest, indent=1) + "\n").encode())
    trainer.state_path.unlink()  # complete: nothing is left to resume
    if options.stages == len(stages):
        _evaluate(options)
        _text(options)
        _drafts(options)


def _evaluate(options: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from dsa_jax.models import checkpoint
    from dsa_jax.models.train import evaluate, ngram
    from dsa_jax.models.train.state import write_atomically

    out = _folder(options, "out")
    encoded, tokenizer = streams.load(_folder(options, "data"))
    dtype = jnp.float32 if options.float32 else jnp.bfloat16
    model = checkpoint.load_pretrained(out, dtype=dtype)
    longest = model.config.dsa.max_position_embeddings
    contexts = streams.windows(encoded.modules("heldout"), [n for n in evaluate.LENGTHS if n <= longest])
    found = evaluate.losses(model, contexts, dtype=dtype)
    _, start = tokenizer_.specials(tokenizer)
    counted = ngram.train(encoded.modules("train"), vocabulary=tokenizer.get_vocab_size(), start=start)
    found["bits_per_byte"] = evaluate.bits_per_byte(
        counted, contexts, found["loss"]["sparse_fp8"], streams.token_bytes(tokenizer), start=start
    )
    found["contexts"] = {str(length): len(rows) for length, rows in contexts.items()}
    found["first_position"] = evaluate.FIRST_POSITION
    found["weights_sha256"] = hashlib.sha256((out / checkpoint.WEIGHTS).read_bytes()).hexdigest()
    found["gates"] = evaluate.gates(found)
    write_atomically(out / "evaluation.json", (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


def _text(options: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from dsa_jax.models import checkpoint
    from dsa_jax.models.train import text
    from dsa_jax.models.train.state import write_atomically

    out = _folder(options, "out")
    dtype = jnp.float32 if options.float32 else jnp.bfloat16
    tokenizer = checkpoint.load_tokenizer(out)
    found = text.check(
        checkpoint.load_pretrained(out, dtype=dtype),
        tokenizer,
        corpus.load(_folder(options, "data")),
        bos=tokenizer_.specials(tokenizer)[0],
        seed=options.seed,
        dtype=dtype,
    )
    write_atomically(out / "text.json", (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    print(json.dumps(found, indent=1, ensure_ascii=False))


def _drafts(options: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from dsa_jax.models import checkpoint
    from dsa_jax.models.train import drafts
    from dsa_jax.models.train.state import write_atomically

    out = _folder(options, "out")
    tokenizer = checkpoint.load_tokenizer(out)
    model = checkpoint.load_pretrained(out, dtype=jnp.float32 if options.float32 else jnp.bfloat16)
    documents = corpus.load(_folder(options, "data"))
    prompts = drafts.heldout_prompts(documents, tokenizer, bos=tokenizer_.specials(tokenizer)[0])
    found = drafts.check(model, prompts)
    write_atomically(out / "drafts.json", (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


def _card(options: argparse.Namespace) -> None:
    from dsa_jax.models.train import card

    card.write(_folder(options, "out"))


if __name__ == "__main__":
    sys.exit(main())
