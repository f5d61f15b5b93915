"""Text as tokens: the source of Python's standard library, and the split of tokens into training and test windows."""

from __future__ import annotations

from shardscope.errors import DataError
from shardscope.storage import python_source
from shardscope.storage.rows import held_out_tokens
from shardscope.training.data.sources import Array, Dataset, WindowSource


def read_python_source(*, seq: int, vocab: int | None = None) -> Dataset:
    """Read the source of the installed Python's standard library (over 10 MB), with one token per byte.

    Args:
        seq: Tokens per window.
        vocab: The model's vocabulary size; reading a token outside it raises an error. None accepts all tokens.
    """
    return split_windows(python_source.tokens(), seq=seq, vocab=vocab)


def split_windows(tokens: Array, *, seq: int, vocab: int | None = None) -> Dataset:
    """Split tokens into windows of `seq` tokens; the last 5 % of the tokens (at least one window) are for testing.

    Raises:
        DataError: There are too few tokens for one training and one test window.
    """
    if tokens.ndim == 1 and len(tokens) < 2 * (seq + 1):
        raise DataError(
            f"{len(tokens)} tokens are too few to train and test with seq={seq}; "
            f"give at least {2 * (seq + 1)}"
        )
    num_test = held_out_tokens(len(tokens), seq)
    return Dataset(
        train=WindowSource(tokens[:-num_test], seq, vocab), test=WindowSource(tokens[-num_test:], seq, vocab)
    )
