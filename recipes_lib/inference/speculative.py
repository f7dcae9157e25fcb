"""Speculative decoding: guess a few tokens cheaply, and check all of them in one call of the model.

Problem    A call for one token reads all weights for one row of arithmetic. So generation waits for
           memory, and a call for a few tokens takes hardly longer than one for a single token.
Idea       Somebody cheap drafts k tokens. One call of the model gives its own choice after each of
           them. The draft is kept up to the first token that the model would not have chosen, and
           there the model's choice takes its place:

               text     the cat sat
               draft                on   the  mat  .
               model                on   the  sofa .          the model's choice after each token
               kept                 on   the  sofa            three tokens from one call

           Two drafts: **prompt lookup** copies what followed the last words where they stood
           before, and needs no second model. A **draft decoder** is a smaller model with the same
           vocabulary.
Saves      Time per token. With a, the chance that a drafted token is right, and c, the time of a
           draft token over that of a model call:

               speed-up = (1 - a^(k+1)) / ((1 - a) (k c + 1))

           The 1 is the call that checks. It holds where k + 1 tokens take as long as one. Where
           they take v times as long, v stands in its place.
Costs      The call that checks computes k tokens more than needed when the draft is wrong. A draft
           decoder has weights and a cache of its own.
Use when   One answer at a time, and the answer repeats its prompt: edits of a text or of code,
           summaries, answers from documents. Or a small model exists that often agrees.
Not when   Batches are large: the arithmetic that drafts use is not idle any more. On free chat a
           lookup finds little.
In production   `model.generate(prompt_lookup_num_tokens=3)` or `model.generate(assistant_model=…)`;
           vLLM `--speculative-config '{"method": "ngram", "num_speculative_tokens": 5,
           "prompt_lookup_max": 4}'`; llama.cpp `--model-draft`.
Source     Leviathan et al., arXiv 2211.17192 (the formula); Chen et al., arXiv 2302.01318; Saxena,
           "Prompt Lookup Decoding" (2023).

The answer is the greedy one if a token gets the same logits in a call of k + 1 tokens as in a call
of its own. Most kernels compute one row differently from several, and then a near tie can go the
other way. So the attention of each token has a call of its own (`row_by_row`). That makes a decoder
exact whose linear layers are. `row_difference` says what a decoder does: 0.0 is exact. Four tokens
of SmolLM2 on a CPU, row by row:

    exact          fp16 weights, int8 "weight_only" and "per_token", int4
    last bits      fp32
    not exact      bf16 weights: one row and several take different products
    not at all     int8 "dynamic": one scale for all tokens of a call, and so it is refused

Shapes: K tokens of a call, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes_lib.core.measure import in_turns
from recipes_lib.core.model.decoding import (
    CausalDecoder,
    KeyValueCache,
    require_decoder,
    stop_ids,
    token_row,
)
from recipes_lib.core.model.marks import ONE_SCALE_PER_CALL, marked

# --- the idea: what a learner can copy ------------------------------------------------------------


def looked_up(text: list[int], *, ngram: int, shortest: int, most: int) -> list[int]:
    """A draft by lookup: what followed `text`'s last tokens earlier: `most` tokens, or none."""
    for size in range(min(ngram, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return copied(text, end, most)
    return []


def copied(text: list[int], begin: int, most: int) -> list[int]:
    """A draft by copying: `most` tokens from `begin` on. At the end the copy goes on in itself."""
    period = len(text) - begin
    return [text[begin + step % period] for step in range(most)]


def checked(
    decoder: CausalDecoder, cache: KeyValueCache, last: int, draft: list[int], row_by_row: bool
) -> list[int]:
    """A draft, checked: the model's next tokens, 1 to k + 1 of them, from one call.

    `last` is the last token of the text; the cache holds those before it, and then it and what is
    kept of the draft.
    """
    before = cache.length
    tokens = torch.tensor([[last, *draft]])  # [1, k + 1]
    logits = decoder(tokens, cache, row_by_row=row_by_row)  # [1, k + 1, V]
    chosen = logits[0].argmax(-1).tolist()  # after `last`, after draft[0], after draft[1] …
    agreed = 0
    while agreed < len(draft) and draft[agreed] == chosen[agreed]:
        agreed += 1
    cache.truncate(before + 1 + agreed)  # what came after a wrong token is forgotten
    return chosen[: agreed + 1]


# --- the technique --------------------------------------------------------------------------------

# Gets the text so far, and the largest number of tokens; returns a draft, which may be empty.
Drafter = Callable[[list[int], int], list[int]]


@dataclass
class Speculation:
    """An answer, and what became of the drafts.

    The prefill, which gives the first token, is no call here. Compared are drafted tokens that were
    accepted, or were the first wrong one of their call: what follows that says nothing about the
    draft.
    """

    tokens: list[int]  # of the answer, without the prompt
    accepted: int = 0  # drafted tokens that the answer kept
    compared: int = 0
    calls: int = 0
    drafted_calls: int = 0  # those that checked a draft

    def add(self, draft: list[int], chosen: list[int], kept: list[int]) -> None:
        """A draft is checked: the model has chosen these tokens, and the answer keeps them."""
        # The last one chosen is the model's own. A stop token may end the answer before it.
        accepted = min(len(chosen) - 1, len(kept))
        self.tokens += kept
        self.calls += 1
        self.accepted += accepted
        self.compared += accepted
        if draft:
            self.drafted_calls += 1
        if len(kept) == len(chosen) <= len(draft):
            self.compared += 1  # the model's own took the place of a wrong one

    @property
    def acceptance(self) -> float:
        """The chance that a drafted token is right if those before it are: `a` of the formula."""
        return self.accepted / self.compared if self.compared else 0.0

    @property
    def draft_share(self) -> float:
        return self.drafted_calls / self.calls if self.calls else 0.0


def prompt_lookup_generate(
    decoder: CausalDecoder,
    prompt: Sequence[int] | Tensor,
    *,
    new_tokens: int,
    draft_tokens: int = 3,
    stop: Collection[int] = (),
) -> Speculation:
    """Generate greedily; drafts are copies of what followed the last one to three tokens before."""

    def copies(text: list[int], most: int) -> list[int]:
        return looked_up(text, ngram=3, shortest=1, most=most)

    options = {"new_tokens": new_tokens, "draft_tokens": draft_tokens, "stop": stop}
    return _generate_with_drafts(decoder, prompt, copies, **options)


def speculative_generate(
    decoder: CausalDecoder,
    draft_decoder: CausalDecoder,
    prompt: Sequence[int] | Tensor,
    *,
    new_tokens: int,
    draft_tokens: int = 3,
    stop: Collection[int] = (),
) -> Speculation:
    """Generate greedily with `decoder`; `draft_decoder` drafts. Arguments as above."""
    if decoder.vocabulary != draft_decoder.vocabulary:
        raise ValueError(
            f"the decoder has {decoder.vocabulary} tokens and the draft decoder "
            f"{draft_decoder.vocabulary}: give a draft decoder with the same tokenizer, or use "
            f"prompt_lookup_generate, which needs none"
        )
    room = token_row(prompt, vocabulary=decoder.vocabulary).shape[1] + new_tokens
    drafts = DecoderDrafts(draft_decoder, max_tokens=room)
    options = {"new_tokens": new_tokens, "draft_tokens": draft_tokens, "stop": stop}
    return _generate_with_drafts(decoder, prompt, drafts, **options)


def _generate_with_drafts(
    decoder: CausalDecoder,
    prompt: Sequence[int] | Tensor,
    drafter: Drafter,
    *,
    new_tokens: int,
    draft_tokens: int,
    stop: Collection[int],
) -> Speculation:
    """Draft, check, keep: until the answer has its tokens, or ends."""
    require_decoder(decoder)
    _refuse_one_scale(decoder)
    stop = stop_ids(stop)
    tokens = token_row(prompt, vocabulary=decoder.vocabulary)  # [1, S]
    end = tokens.shape[1] + new_tokens
    cache = decoder.new_cache(max_tokens=end)
    first = decoder(tokens, cache, last_only=True).argmax(-1)  # [1, 1]
    text = [*tokens[0].tolist(), int(first)]
    answer = Speculation([int(first)])
    while len(text) < end and text[-1] not in stop:
        # A call gives one token more than the draft has: never more than are wanted.
        most = min(draft_tokens, end - len(text) - 1)
        draft = drafter(text, most) if most > 0 else []
        chosen = checked(decoder, cache, text[-1], draft, row_by_row=True)
        kept = _up_to_stop(chosen, stop)
        text += kept
        answer.add(draft, chosen, kept)
    return answer


def _up_to_stop(tokens: list[int], stop: Collection[int]) -> list[int]:
    """The tokens of a draft or an answer up to the first that ends it, included."""
    for place, token in enumerate(tokens):
        if token in stop:
            return tokens[: place + 1]
    return tokens


class DecoderDrafts:
    """Greedy drafts of another decoder, with a cache of its own."""

    def __init__(self, decoder: CausalDecoder, *, max_tokens: int) -> None:
        self._decoder = decoder
        self._cache = decoder.new_cache(max_tokens=max_tokens)

    def __call__(self, text: list[int], most: int) -> list[int]:
        """A draft by the other decoder: up to `most` tokens behind `text`."""
        # The text took over the last draft up to a wrong token, and one token of the model follows:
        # before that one, the cache has the tokens of the text. All behind it is forgotten.
        self._cache.truncate(min(self._cache.length, len(text) - 1))
        tokens = torch.tensor([text[self._cache.length :]])  # [1, 1 or more]
        draft: list[int] = []
        while len(draft) < most:
            logits = self._decoder(tokens, self._cache, last_only=True)  # [1, 1, V]
            tokens = logits.argmax(-1)  # [1, 1]
            draft.append(int(tokens))
        return draft


# --- guards ---------------------------------------------------------------------------------------


def row_difference(decoder: CausalDecoder, prompt: Sequence[int] | Tensor) -> float:
    """How much a call of the last four tokens changes logits: a draft is checked in such a call.

    Compared are their logits in one call, and those of a call for each. 0.0 means that speculation
    gives the greedy answer, whatever the draft. Anything else means that a near tie can go the
    other way.
    """
    row = token_row(prompt, vocabulary=decoder.vocabulary)  # [1, S]
    begin = row.shape[1] - 4
    cache = decoder.new_cache(max_tokens=row.shape[1])
    decoder(row[:, :begin], cache, last_only=True)
    together = decoder(row[:, begin:], cache, row_by_row=True)  # [1, K, V]
    cache.truncate(begin)
    alone = [decoder(row[:, place : place + 1], cache) for place in range(begin, row.shape[1])]
    return (together - torch.cat(alone, dim=1)).abs().max().item()


def _refuse_one_scale(decoder: CausalDecoder) -> None:
    """Drafts are checked together: raise ValueError where tokens of a call share a rounding."""
    modules = decoder.named_modules() if isinstance(decoder, torch.nn.Module) else ()
    layers = [name for name, module in modules if marked(module, ONE_SCALE_PER_CALL)]
    if layers:
        raise ValueError(
            f'{layers[0]} rounds all tokens of a call by one scale (int8 "dynamic"), so drafts '
            f'would change the text: quantize with kind="weight_only" or "per_token", or use '
            f"greedy, which has no drafts"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_speedup(
    acceptance: float,
    *,
    draft_tokens: int,
    cost_ratio: float,
    verify_ratio: float = 1.0,
) -> float:
    """How many times faster drafts are than greedy decoding: the formula of the first page.

    Args:
        acceptance: a, the chance that a drafted token is right if those before it are.
        draft_tokens: k.
        cost_ratio: c, the time of a drafted token over that of a call for one token. 0 for a
            prompt lookup.
        verify_ratio: the time of a call for k + 1 tokens over that of a call for one
            (`measured_verify_ratio`). The published formula has 1.
    """
    accepted = sum(acceptance**place for place in range(1, draft_tokens + 1))  # a + a² + … + a^k
    seconds = verify_ratio + draft_tokens * cost_ratio  # in calls for one token
    return (1 + accepted) / seconds


def measured_verify_ratio(
    decoder: CausalDecoder,
    prompt: Sequence[int] | Tensor,
    *,
    draft_tokens: int = 3,
) -> float:
    """To check a draft: the time of a call for k + 1 tokens over that of a call for one."""
    require_decoder(decoder)
    row = token_row(prompt, vocabulary=decoder.vocabulary)  # [1, S]
    length = row.shape[1]
    cache = decoder.new_cache(max_tokens=length + draft_tokens + 1)
    decoder(row, cache, last_only=True)
    several = row[:, -1:].expand(1, draft_tokens + 1).contiguous()  # [1, k + 1]

    def call(tokens: Tensor) -> None:
        cache.truncate(length)
        decoder(tokens, cache, row_by_row=True)

    steps = {"one": lambda: call(several[:, :1]), "several": lambda: call(several)}
    for step in steps.values():
        step()
    seconds = in_turns(steps, rounds=9)
    ratios = [many / one for many, one in zip(seconds["several"], seconds["one"])]
    return statistics.median(ratios)
