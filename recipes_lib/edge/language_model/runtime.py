"""A `.pte` of a language model in ExecuTorch's runtime: the prompt, then token by token.

The file holds the cache of keys and values. A call gets tokens and the position of the first one,
writes their keys and values into the cache, and returns the logits behind the last token. So the
next text simply begins at position 0 again.

Two libraries register the operators that the file needs when they are imported: the one for
attention (`llama::custom_sdpa`) and the one for the embedding in 8 bits. Without them loading
fails, and so it does in the C++ runner, with less to say.

Shapes: S tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.decoding import token_row
from recipes_lib.edge._executorch import executorch_runtime
from recipes_lib.edge._silenced_libraries import noise_to

ATTENTION_OPERATORS = "executorch.extension.llm.custom_ops.custom_ops"  # imported, they register


class PteLanguageModel:
    """A language model that ExecuTorch's runtime executes; `load_language_model` makes one."""

    def __init__(self, path: Path, *, threads: int) -> None:
        """Load the `.pte` of a language model, to run on so many threads."""
        with noise_to():
            require(ATTENTION_OPERATORS)
            runtime = executorch_runtime(threads=threads)
            start = time.perf_counter()
            # The file comes from this machine: its parts need not be checked one by one.
            least = require("executorch.runtime").Verification.Minimal
            self._program = runtime.load_program(path, verification=least)
            self._forward = self._program.load_method("forward")
            self.max_length = self._constant_in_file("get_max_context_len")
            self.vocabulary = self._constant_in_file("get_vocab_size")
            self.load_seconds = time.perf_counter() - start

    def prefill(self, prompt: Any) -> Tensor:
        """The `.pte` reads a prompt from position 0 on. Returns the logits behind it, fp32 [V]."""
        ids = token_row(prompt, vocabulary=self.vocabulary)
        if ids.shape[1] >= self.max_length:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens, the file has room for "
                f"{self.max_length - 1} and one more: export it with a larger max_length"
            )
        return self._run_forward(ids, position=0)

    def step(self, token: int, position: int) -> Tensor:
        """The `.pte` reads one token at `position`, behind all before. Returns logits, fp32 [V]."""
        # Behind its end the runtime would write into other memory.
        check_whole(least=0, most=self.max_length - 1, position=position)
        return self._run_forward(torch.tensor([[token]]), position=position)

    def greedy(self, prompt: Any, new_tokens: int) -> list[int]:
        """The `new_tokens` most likely tokens behind `prompt` by the `.pte`, one by one."""
        position = token_row(prompt, vocabulary=self.vocabulary).shape[1]
        answer = [int(self.prefill(prompt).argmax())]
        while len(answer) < new_tokens:
            answer.append(int(self.step(answer[-1], position).argmax()))
            position += 1
        return answer

    def _run_forward(self, ids: Tensor, *, position: int) -> Tensor:
        return self._forward.execute([ids, torch.tensor([position])])[0].view(-1)

    def _constant_in_file(self, name: str) -> int:
        return int(self._program.load_method(name).execute([])[0])
