"""A corpus of real text as token ids: the sources and documents of the Linux kernel."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from trainlib.inputs import BadInput, reading

SUFFIXES = (".c", ".h", ".rst", ".S", ".txt", ".py")
SEED = 20  # of the order of files
# Bytes. Longer files are tables of registers that a program wrote, the same line thousands of
# times: two fifths of the text.
LONGEST = 150_000
TOKENIZER_BYTES = 24_000_000
PART = 1 << 16  # characters that are tokenised at a time
VALIDATION = 400_000  # tokens at the end that no run trains on


@dataclass(frozen=True)
class Corpus:
    """Token ids in the order of the shuffled files.

    Attributes:
        tokens: ids, uint16 ``[n]``; the last ``VALIDATION`` are held out.
        source: name of the archive that they come from.
        text_bytes: bytes of text.
        vocab: ids that there are.
        sha256: of the token ids.
        limit, longest: what :func:`build` was told.
    """

    tokens: Any
    source: str
    text_bytes: int
    vocab: int
    sha256: str
    limit: int
    longest: int

    def describe(self) -> dict[str, Any]:
        """Everything but the tokens, and how many they are."""
        return {
            "source": self.source,
            "text_bytes": self.text_bytes,
            "tokens": len(self.tokens),
            "vocab": self.vocab,
            "sha256": self.sha256,
            "limit": self.limit,
            "longest": self.longest,
        }


def texts(archive: Path, limit: int, longest: int) -> Iterator[str]:
    """Files of the archive in a random order that the seed fixes, up to ``limit`` bytes.

    Without those of more than ``longest`` bytes.

    Raises:
        BadInput: where the archive is missing or damaged, or has no such file.
    """
    try:
        with reading(archive), tarfile.open(archive) as tar:
            found = {
                member.name: file.read()
                for member in tar
                if member.isfile()
                and member.name.endswith(SUFFIXES)
                and member.size <= longest
                and (file := tar.extractfile(member)) is not None
            }
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        what = str(error).partition("\n")[0].rstrip(":")
        raise BadInput(f"{archive}: no tar archive, or a damaged one: {what}") from None
    if not any(found.values()):
        raise BadInput(
            f"{archive}: no file of 1 to {longest:,} bytes that ends in {', '.join(SUFFIXES)}"
        )
    names = sorted(found)
    random.Random(SEED).shuffle(names)
    total = 0
    for name in names:
        if total >= limit:
            return
        total += len(found[name])
        yield found[name].decode("utf-8", "replace") + "\n"


def build(archive: Path, limit: int, vocab: int, longest: int = LONGEST) -> Corpus:
    """Tokenise by a byte-level BPE that is trained on the beginning of the same text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = "".join(texts(archive, limit, longest))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts = [text[i : i + PART] for i in range(0, len(text), PART)]
    tokenizer.train_from_iterator(parts[: TOKENIZER_BYTES // PART], trainer)
    encoded = tokenizer.encode_batch_fast(parts)
    tokens = np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    return Corpus(tokens, archive.name, len(text.encode()), vocab, digest, limit, longest)


def save(corpus: Corpus, path: Path) -> None:
    """As a compressed ``.npz``, whatever the name ends in."""
    about = {k: v for k, v in asdict(corpus).items() if k != "tokens"}
    with path.open("wb") as file:
        np.savez_compressed(file, tokens=corpus.tokens, about=np.array(json.dumps(about)))


def load(path: Path) -> Corpus:
    """What :func:`save` wrote.

    Raises:
        BadInput: where the file is none, or the ids are not those that were written.
    """
    with reading(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise BadInput(f"{path}: no corpus, expected a file that `train.py corpus` wrote")
        try:
            with np.load(path) as found:
                tokens, about = found["tokens"], json.loads(str(found["about"]))
        # What zip, deflate, .npy and JSON raise for bytes that are not theirs.
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError) as error:
            raise BadInput(
                f"{path}: no corpus, or a damaged one; expected a file that `train.py corpus` "
                f"wrote: {error}"
            ) from None
    names = [f.name for f in fields(Corpus) if f.name != "tokens"]
    missing = [name for name in names if name not in about]
    if missing:
        raise BadInput(
            f"{path}: {', '.join(missing)} not noted, as an earlier version left it; make it again"
        )
    if hashlib.sha256(tokens.tobytes()).hexdigest() != about["sha256"]:
        raise BadInput(f"{path}: the token ids are damaged (their sha256 differs)")
    if len(tokens) and tokens.max() >= about["vocab"]:
        raise BadInput(f"{path}: token id {tokens.max()}, expected fewer than its {about['vocab']}")
    return Corpus(tokens, **{name: about[name] for name in names})
