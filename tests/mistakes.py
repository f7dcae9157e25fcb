"""Mistakes that nobody would notice. `tests/plant_mistakes.py` plants each; a test has to see it.

To add one: take a line whose change raises no error and gives a plausible, wrong result.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """`right` occurs exactly once in the file; `wrong` is what a hurried change makes of it."""

    name: str
    file: str  # in recipes_lib
    right: str
    wrong: str
    tests: tuple[str, ...]  # files in tests, of which one has to fail
    suffers: str  # what a user would suffer


def mistake(
    name: str, *, file: str, right: str, wrong: str, tests: str | list[str], suffers: str
) -> Mistake:
    """One of the list; most have one test file."""
    if isinstance(tests, str):
        tests = [tests]
    return Mistake(name, file, right, wrong, tuple(tests), suffers)


CORE = [
    mistake(
        "time under the account",
        file="core/measure.py",
        right="median = statistics.median(seconds or [under_account])",
        wrong="median = under_account",
        tests="core/test_measure.py",
        suffers="Each step seems to take as long as it does while its memory is counted.",
    ),
    mistake(
        "gradients from before",
        file="core/live_bytes.py",
        right="                    self.see(thing.grad)",
        wrong="                    pass",
        tests="core/test_measure.py",
        suffers="With accumulated gradients the measured peak is too low.",
    ),
    mistake(
        "resized storage",
        file="core/live_bytes.py",
        right="if known.size != size:",
        wrong="if known.size == 0 and size > 0:",
        tests="core/test_measure.py",
        suffers="Memory that is resized in place, as in FSDP, keeps its first size in all peaks.",
    ),
    mistake(
        "states called activations",
        file="core/timeline.py",
        right="self._label_what_is_there()  # states that the step has made",
        wrong="pass",
        tests="core/test_timeline.py",
        suffers="The chart blames activations for what the optimizer has allocated.",
    ),
    mistake(
        "order of estimates",
        file="core/budget.py",
        right="later = [done for done in budget.applied if done.order > order]",
        wrong="later = []",
        tests="core/test_budget.py",
        suffers="Estimates in the wrong order are composed to a wrong peak in silence.",
    ),
    mistake(
        "two logit tensors",
        file="core/plain_step.py",
        right="return max(3 * logits, logits + tensor_bytes(head_of(model)))",
        wrong="return max(2 * logits, logits + tensor_bytes(head_of(model)))",
        tests=["core/test_plain_step.py", "core/test_budget.py"],
        suffers="The predicted peak of a large vocabulary is a third too low at the loss.",
    ),
    mistake(
        "tied embedding",
        file="core/plain_step.py",
        right="        embedding_gradient=embedding_copies(model),",
        wrong="        embedding_gradient=0,",
        tests=["core/test_plain_step.py", "core/test_budget.py"],
        suffers="The two gradients of a tied embedding that are added up are not predicted.",
    ),
    mistake(
        "head trains after LoRA",
        file="core/plain_step.py",
        right="return head_of(model).requires_grad and not budget.base_frozen",
        wrong="return head_of(model).requires_grad",
        tests=["core/test_plain_step.py", "memory/test_chunked_cross_entropy.py"],
        suffers="After LoRA the plan still pays for the gradient of a frozen output layer.",
    ),
    mistake(
        "scales of 4-bit weights",
        file="core/sizes.py",
        right="tensors += quantization_tensors(parameter)",
        wrong="tensors += []",
        tests=["core/test_sizes.py", "fine_tuning/test_qlora.py"],
        suffers="The bytes of a quantized model leave out its scales.",
    ),
    mistake(
        "signature lost",
        file="core/mixing.py",
        right="    @functools.wraps(module_class.forward)\n",
        wrong="",
        tests="core/test_mixing.py",
        suffers="The Trainer reads the signature of forward, and drops columns of the batch.",
    ),
    mistake(
        "infinite numbers",
        file="core/checks.py",
        right="inside = number and math.isfinite(value)",
        wrong="inside = number",
        tests="core/test_checks.py",
        suffers="A learning rate of infinity or not-a-number is accepted.",
    ),
    mistake(
        "reads in both directions",
        file="core/causal_lm.py",
        right='if reads_both_ways and hasattr(config, "is_decoder") and not config.is_decoder:',
        wrong="if False:",
        tests=["core/test_causal_lm.py", "test_causal_lm_guard.py"],
        suffers="Recipes for causal models are applied to BERT.",
    ),
    mistake(
        "filled cache recomputed",
        file="core/recompute.py",
        right="if any(cache.get_seq_length(index) > 0 for cache in caches):",
        wrong="if False:",
        tests=["core/test_recompute.py", "memory/test_activation_checkpointing.py"],
        suffers="A checkpointed block attends to fewer tokens than it should, and trains so.",
    ),
    mistake(
        "token over the border",
        file="core/chat.py",
        right="borders_hold = asked[: len(before)] == before and answered[: len(asked)] == asked",
        wrong="borders_hold = True",
        tests="core/test_chat.py",
        suffers="Where a token reaches over the border, the answer loses its first characters.",
    ),
    mistake(
        "padding is learnt",
        file="core/data.py",
        right='"labels": padded("labels", IGNORED),',
        wrong='"labels": padded("labels", pad_token_id),',
        tests="core/test_data.py",
        suffers="The model learns to predict padding.",
    ),
    mistake(
        "mean of means",
        file="core/evaluation.py",
        right="        total += mean * count\n        targets += count",
        wrong="        total += mean\n        targets += 1",
        tests="core/test_evaluation.py",
        suffers="The held-out loss depends on the batch size.",
    ),
    mistake(
        "previous row is the first",
        file="report/ladder.py",
        right="to_previous = percent(row.peak_bytes / self.rows[position - 1].peak_bytes - 1)",
        wrong="to_previous = percent(row.peak_bytes / self.rows[0].peak_bytes - 1)",
        tests="report/test_ladder.py",
        suffers="Each step of the ladder claims the savings of all steps before it.",
    ),
    mistake(
        "last run overwritten",
        file="report/ladder.py",
        right="            self._put_last_run_aside()",
        wrong="            pass",
        tests="report/test_ladder.py",
        suffers="The measurements of the last run are lost.",
    ),
]

TRAINING = [
    mistake(
        "own tokens",
        file="training/gradient_accumulation.py",
        right="loss = loss_sum(model, micro) / targets",
        wrong="loss = loss_sum(model, micro) / count_targets(micro)",
        tests="training/test_gradient_accumulation.py",
        suffers="Short answers weigh more than long ones, as in old versions of the Trainer.",
    ),
    mistake(
        "targets without the shift",
        file="training/gradient_accumulation.py",
        right='return (batch["labels"][:, 1:] != IGNORED).sum()',
        wrong='return (batch["labels"] != IGNORED).sum()',
        tests="training/test_gradient_accumulation.py",
        suffers="The gradient is too small by the first token of each row.",
    ),
    mistake(
        "carried gradients",
        file="training/gradient_accumulation.py",
        right="        carried=budget.gradients,",
        wrong="        carried=0,",
        tests="training/test_gradient_accumulation.py",
        suffers="The predicted peak leaves out the gradients of earlier micro-batches.",
    ),
    mistake(
        "label over the border",
        file="training/sequence_packing.py",
        right='pack["labels"] += [IGNORED, *row["labels"][1:]]',
        wrong='pack["labels"] += row["labels"]',
        tests="training/test_sequence_packing.py",
        suffers="The last token of a document learns to predict the next, unrelated document.",
    ),
    mistake(
        "positions go on",
        file="training/sequence_packing.py",
        right='pack["position_ids"] += range(len(row["input_ids"]))',
        wrong='pack["position_ids"] = list(range(len(pack["input_ids"])))',
        tests="training/test_sequence_packing.py",
        suffers="Documents in one row read each other.",
    ),
    mistake(
        "same order each epoch",
        file="training/curriculum.py",
        right='generator = random.Random(f"{seed} {epoch}")',
        wrong='generator = random.Random(f"{seed}")',
        tests="training/test_curriculum.py",
        suffers="Every epoch cuts and orders the text alike.",
    ),
    mistake(
        "rows that grow too late",
        file="training/curriculum.py",
        right="ends = [round(steps * share) for share in itertools.accumulate(shares)]",
        wrong="ends = [int(steps * share) for share in itertools.accumulate(shares)]",
        tests="training/test_curriculum.py",
        suffers="Shares such as 0.1 + 0.2 + 0.7 lose steps to rounding.",
    ),
    mistake(
        "failed attempt's gradients",
        file="training/dynamic_batch.py",
        right="        parameter.grad = None",
        wrong="        pass",
        tests="training/test_dynamic_batch.py",
        suffers="After a failed attempt some rows count twice in the gradient.",
    ),
    mistake(
        "failed attempt's random numbers",
        file="training/dynamic_batch.py",
        right="_set_random_states(random_states)",
        wrong="pass",
        tests="training/test_dynamic_batch.py",
        suffers="A run that once ran out of memory cannot be repeated.",
    ),
    mistake(
        "random state on resume",
        file="training/exact_resume.py",
        right='    _set_random_states(state["random"])',
        wrong="    pass",
        tests="training/test_exact_resume.py",
        suffers="The resumed run draws other dropout than the one that was never stopped.",
    ),
    mistake(
        "another run's checkpoint",
        file="training/exact_resume.py",
        right='    _check_run(path, saved=state["run"], given=run)',
        wrong="    pass",
        tests="training/test_exact_resume.py",
        suffers="A run goes on with other settings than it began with.",
    ),
    mistake(
        "values of a lost past",
        file="training/tracking.py",
        right="kept[name] = {step: values[step] for step in values if step < point.step}",
        wrong="pass",
        tests="training/test_tracking.py",
        suffers="After a resume the curve keeps values of steps that were taken back.",
    ),
    mistake(
        "failed run is called finished",
        file="training/tracking.py",
        right="self.close(failed=error is not None)",
        wrong="self.close()",
        tests="training/test_tracking.py",
        suffers="A run that crashed is listed as finished.",
    ),
]

PRECISION = [
    mistake(
        "clip before unscale",
        file="precision/mixed_precision.py",
        right="            self.scaler.unscale_(optimizer)\n",
        wrong="",
        tests="precision/test_mixed_precision.py",
        suffers="In fp16 the norm is 65,536 times too large, so clipping removes the update.",
    ),
    mistake(
        "skipped step counts",
        file="precision/mixed_precision.py",
        right="return self.scaler.get_scale() >= before",
        wrong="return True",
        tests="precision/test_mixed_precision.py",
        suffers="The learning rate moves on where gradients overflowed and nothing was updated.",
    ),
    mistake(
        "embeddings in 8 bits",
        file="precision/eight_bit_adam.py",
        right='{"params": [p for p in trainable if p in tables], "optim_bits": embedding_bits},',
        wrong='{"params": [p for p in trainable if p in tables], "optim_bits": 8},',
        tests="precision/test_eight_bit_adam.py",
        suffers="Rare tokens get unstable updates.",
    ),
    mistake(
        "bits of the group",
        file="precision/eight_bit_adam.py",
        right='return config | {"optim_bits": group["optim_bits"]}',
        wrong="return config",
        tests="precision/test_eight_bit_adam.py",
        suffers="What the caller says about bits is ignored.",
    ),
    mistake(
        "no random bits",
        file="precision/pure_bf16.py",
        right="    raw += bits\n",
        wrong="",
        tests="precision/test_pure_bf16.py",
        suffers="Weights are cut off instead of rounded: small updates are lost.",
    ),
    mistake(
        "masters resumed in bf16",
        file="precision/pure_bf16.py",
        right="self.state[parameter][name] = value.to(parameter.device, copy=True)",
        wrong="pass",
        tests="precision/test_pure_bf16.py",
        suffers="A resumed run loses the lower half of its masters.",
    ),
]

ATTENTION = [
    mistake(
        "padding on the left of flash",
        file="attention/flash_hf.py",
        right="(attention_mask[:, 1:] <= attention_mask[:, :-1]).all()",
        wrong="True",
        tests="attention/test_flash.py",
        suffers="Generated answers in a batch read the padding in front of them.",
    ),
    mistake(
        "capped scores",
        file="attention/flash_hf.py",
        right='for name in ("softcap", "s_aux", "output_attentions"):',
        wrong='for name in ("s_aux", "output_attentions"):',
        tests="attention/test_flash.py",
        suffers="Gemma 2 computes without the cap on its scores.",
    ),
    mistake(
        "window off by one",
        file="attention/sliding_window_banded.py",
        right="in_window = key > query - window",
        wrong="in_window = key >= query - window",
        tests="attention/test_sliding_window.py",
        suffers="Each token reads one token more than the model was trained with.",
    ),
    mistake(
        "padding on the left of the window",
        file="attention/sliding_window_hf.py",
        right="left_padding = (attention_mask[:, 1:] > attention_mask[:, :-1]).any()",
        wrong="left_padding = False",
        tests="attention/test_sliding_window.py",
        suffers="Padded texts read their padding.",
    ),
    mistake(
        "global block",
        file="attention/block_sparse.py",
        right="    reads.update(range(min(pattern.global_blocks, own)))\n",
        wrong="",
        tests="attention/test_block_sparse.py",
        suffers="No token reads the beginning of the text.",
    ),
    mistake(
        "document mask",
        file="attention/block_sparse_cpu.py",
        right="hidden = later | other_document",
        wrong="hidden = later",
        tests="attention/test_block_sparse.py",
        suffers="Packed documents read each other.",
    ),
    mistake(
        "padding on the left of blocks",
        file="attention/block_sparse_hf.py",
        right="(attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()",
        wrong="False",
        tests="attention/test_block_sparse.py",
        suffers="The pattern lies elsewhere in each row of the batch.",
    ),
    mistake(
        "sharpening of YaRN",
        file="architecture/rope.py",
        right="sharpening = 0.1 * math.log(factor) + 1",
        wrong="sharpening = 1.0",
        tests="architecture/test_rope.py",
        suffers="Our frequencies are no longer those of the model that transformers builds.",
    ),
    mistake(
        "trained length of dynamic",
        file="architecture/rope.py",
        right='    if kind != "dynamic":',
        wrong="    if True:",
        tests="architecture/test_rope.py",
        suffers="Dynamic scaling never begins, because the text never seems too long.",
    ),
]

MEMORY = [
    mistake(
        "slope of the cap",
        file="memory/chunked_cross_entropy_autograd.py",
        right="        gradient.mul_(slope)",
        wrong="        pass",
        tests="memory/test_chunked_cross_entropy.py",
        suffers="Gemma 2 trains with a wrong gradient; the loss is right.",
    ),
    mistake(
        "ignored labels in the mean",
        file="memory/chunked_cross_entropy.py",
        right="divisor = _divisor(len(rows), reduction, num_items)",
        wrong="divisor = _divisor(labels.numel(), reduction, num_items)",
        tests="memory/test_chunked_cross_entropy.py",
        suffers="The more padding, the smaller the loss and its gradient.",
    ),
    mistake(
        "tile of the recomputation",
        file="memory/tiled_mlp.py",
        right="        tiles = _saved_tiles(saved_input)",
        wrong="        return forward(_saved_tiles(saved_input)[0])",
        tests="memory/test_tiled_mlp.py",
        suffers="Every tile gets the gradient of the first.",
    ),
    mistake(
        "tiles hold the input",
        file="memory/tiled_mlp.py",
        right="    tiles.clear()",
        wrong="    pass",
        tests="memory/test_tiled_mlp.py",
        suffers="Under activation checkpointing the inputs of all blocks stay alive.",
    ),
    mistake(
        "group of one checkpoint",
        file="memory/nested_checkpointing.py",
        right=(
            "hidden = checkpoint(call.forward, hidden, *call.args, "
            "use_reentrant=False, **call.kwargs)"
        ),
        wrong="hidden = call.forward(hidden, *call.args, **call.kwargs)",
        tests="memory/test_nested_checkpointing.py",
        suffers="Backward holds the activations of a whole group of blocks.",
    ),
    mistake(
        "something between the blocks",
        file="memory/nested_checkpointing.py",
        right="as_handed_on = not group.calls or hidden_states is group.handed_on",
        wrong="as_handed_on = True",
        tests="memory/test_nested_checkpointing.py",
        suffers="What a model or a hook does between two blocks of a group is undone in silence.",
    ),
    mistake(
        "attention recomputed",
        file="memory/activation_checkpointing.py",
        right="    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,\n",
        wrong="",
        tests="memory/test_activation_checkpointing.py",
        suffers="Selective checkpointing recomputes what it promises to keep.",
    ),
    mistake(
        "changed in place",
        file="memory/activation_offload.py",
        right="    if tensor._version != version:",
        wrong="    if False:",
        tests="memory/test_activation_offload.py",
        suffers="Backward computes with a tensor that was overwritten after it was saved.",
    ),
    mistake(
        "storage at the same address",
        file="memory/activation_offload.py",
        right=(
            "if saved is None or saved.origin() is not storage or saved.version != tensor._version:"
        ),
        wrong="if saved is None:",
        tests="memory/test_activation_offload.py",
        suffers="Backward gets the bytes that another tensor had at this address.",
    ),
    mistake(
        "second backward",
        file="memory/optimizer_in_backward.py",
        right="if parameter in self._stepped:",
        wrong="if False:",
        tests="memory/test_optimizer_in_backward.py",
        suffers="Gradient accumulation becomes several steps of part of the batch.",
    ),
    mistake(
        "masters of other weights",
        file="memory/optimizer_offload.py",
        right="if parameter._version != slot.version:",
        wrong="if False:",
        tests="memory/test_optimizer_offload.py",
        suffers="The first step after load_state_dict puts the old weights back.",
    ),
    mistake(
        "last micro-batch only",
        file="memory/optimizer_offload.py",
        right="            slot.gradient.add_(slot.staging)",
        wrong="            slot.gradient.copy_(slot.staging)",
        tests="memory/test_optimizer_offload.py",
        suffers="Of all micro-batches only the last one trains.",
    ),
]

FINE_TUNING = [
    mistake(
        "adapters on routers",
        file="fine_tuning/lora.py",
        right="if is_linear(module) and not is_router:",
        wrong="if is_linear(module):",
        tests="fine_tuning/test_lora.py",
        suffers="Fine-tuning moves tokens to other experts.",
    ),
    mistake(
        "states of the base",
        file="fine_tuning/lora.py",
        right="        states=2 * trainable,\n",
        wrong="",
        tests="fine_tuning/test_lora.py",
        suffers="LoRA is predicted to need the optimizer states of the whole model.",
    ),
    mistake(
        "repacked weights",
        file="fine_tuning/qlora.py",
        right="    layer.support_avx512bf16_for_cpu = False",
        wrong="    pass",
        tests="fine_tuning/test_qlora.py",
        suffers="On new CPUs no gradient passes a 4-bit layer, so only the last adapters learn.",
    ),
    mistake(
        "merged without adapters",
        file="fine_tuning/qlora.py",
        right="weight = weight + adapted.get_delta_weight(adapter)",
        wrong="pass",
        tests=["fine_tuning/test_qlora.py", "fine_tuning/test_adapter_files.py"],
        suffers="The merged model has forgotten the fine-tuning.",
    ),
    mistake(
        "adapter of another base",
        file="fine_tuning/adapter_files.py",
        right='if json.loads(recorded.read_text())["fingerprint"] == base_fingerprint(model):',
        wrong="if True:",
        tests="fine_tuning/test_adapter_files.py",
        suffers="An adapter on a base of the same shape gives fluent nonsense.",
    ),
    mistake(
        "bootstrap not paired",
        file="fine_tuning/honest_evaluation.py",
        right="    low, high = paired.interval(level=level, resamples=resamples, seed=seed)",
        wrong=(
            "    low = after.interval()[0] - before.interval()[1]\n"
            "    high = after.interval()[1] - before.interval()[0]"
        ),
        tests="fine_tuning/test_honest_evaluation.py",
        suffers="Real improvements are reported as no difference.",
    ),
    mistake(
        "position of the target",
        file="fine_tuning/completion_only_loss.py",
        right='    labels = batch["labels"][:, 1:]',
        wrong='    labels = batch["labels"]',
        tests="fine_tuning/test_completion_only_loss.py",
        suffers="The model learns to repeat each token instead of the next one.",
    ),
    mistake(
        "end mark not learnt",
        file="fine_tuning/completion_only_loss.py",
        right="if ends & {ids[i] for i in borders}:",
        wrong="if False:",
        tests="fine_tuning/test_completion_only_loss.py",
        suffers="The fine-tuned model never ends its answers.",
    ),
]

WORKFLOWS = [
    mistake(
        "search ends one step early",
        file="workflows/longest.py",
        right="while too_long - fits > 1:",
        wrong="while too_long - fits > 2:",
        tests="workflows/test_longest.py",
        suffers="The predicted longest text is not the longest.",
    ),
    mistake(
        "coarse search",
        file="workflows/longest.py",
        right="while high - low > max(1, resolution * low):",
        wrong="while high - low > max(2, 3 * resolution * low):",
        tests="workflows/test_longest.py",
        suffers="What was found is further from the border than the resolution says.",
    ),
    mistake(
        "memory in pieces",
        file="workflows/out_of_memory_doctor.py",
        right="if pieces >= free and 0 < requested <= pieces + free:",
        wrong="if pieces >= free and 0 < requested <= free:",
        tests=["workflows/test_out_of_memory_doctor.py"],
        suffers="Nobody is told that a setting against fragmentation is enough.",
    ),
    mistake(
        "no room left",
        file="workflows/out_of_memory_doctor_remedies.py",
        right="limit=FITS * memory_bytes",
        wrong="limit=memory_bytes",
        tests=[
            "workflows/test_out_of_memory_doctor_remedies.py",
            "workflows/test_out_of_memory_doctor.py",
        ],
        suffers="The doctor says that it fits, and the CUDA context takes the last bytes.",
    ),
    mistake(
        "other processes' memory",
        file="workflows/out_of_memory_doctor_message.py",
        right='ours = said.get("this process", said["allocated"] + said["unallocated"])',
        wrong='ours = said["allocated"]',
        tests="workflows/test_out_of_memory_doctor_message.py",
        suffers="Our own cache is taken for the memory of somebody else.",
    ),
    mistake(
        "micro batch that does not divide",
        file="workflows/finetune/settings.py",
        right="if self.rows_per_step % rows_at_once != 0:",
        wrong="if False:",
        tests="workflows/finetune/test_settings.py",
        suffers="The libraries train on fewer rows per step than was asked for.",
    ),
    mistake(
        "step repeated on resume",
        file="workflows/finetune/loop.py",
        right="save_checkpoint(folder / CHECKPOINT, step=number + 1, **state)",
        wrong="save_checkpoint(folder / CHECKPOINT, step=number, **state)",
        tests="workflows/finetune/test_loop.py",
        suffers="The step before the interruption is trained twice.",
    ),
    mistake(
        "schedule not resumed",
        file="workflows/finetune/loop.py",
        right='"parts": {"schedule": schedule, "precision": precision},',
        wrong='"parts": {"precision": precision},',
        tests="workflows/finetune/test_loop.py",
        suffers="After a resume the learning rate warms up again.",
    ),
    mistake(
        "largest micro-batch",
        file="workflows/finetune/budget.py",
        right="return max(done, key=lambda plan: plan.peak)",
        wrong="return done[0]",
        tests="workflows/finetune/test_budget.py",
        suffers="The prediction is that of the first micro-batch, which may be the shortest.",
    ),
    mistake(
        "mask of packed rows",
        file="workflows/finetune/budget.py",
        right="if _has_documents(micro):",
        wrong="if False:",
        tests="workflows/finetune/test_budget.py",
        suffers="With packing the predicted peak leaves out the mask.",
    ),
    mistake(
        "processes forgotten",
        file="workflows/finetune/settings.py",
        right="return self.rows_per_step // (self.micro_batch_size * self.processes)",
        wrong="return self.rows_per_step // self.micro_batch_size",
        tests=["workflows/finetune/test_settings.py", "workflows/finetune/test_export.py"],
        suffers="On two GPUs a step takes twice the rows that were asked for.",
    ),
    mistake(
        "cut answers",
        file="workflows/finetune/export.py",
        right='"excess_length_strategy": "drop",',
        wrong='"excess_length_strategy": "truncate",',
        tests="workflows/finetune/test_export.py",
        suffers="In Axolotl long answers lose their end, and the model learns to stop anywhere.",
    ),
    mistake(
        "no token weighting",
        file="workflows/finetune/libraries.py",
        right="    trainer.remove_callback(PrinterCallback)\n",
        wrong=(
            "    trainer.remove_callback(PrinterCallback)\n"
            "    trainer.model_accepts_loss_kwargs = False\n"
        ),
        tests="workflows/finetune/test_libraries.py",
        suffers="The Trainer weighs micro-batches alike, and is compared with another loss.",
    ),
    mistake(
        "held-out pairs trained on",
        file="workflows/finetune/data.py",
        right="others = [pair for pair in pairs if json.dumps(pair) not in known]",
        wrong="others = pairs",
        tests="workflows/finetune/test_data.py",
        suffers="Repeated pairs are trained on and held out, so the loss promises too much.",
    ),
]

MISTAKES = [*CORE, *TRAINING, *PRECISION, *ATTENTION, *MEMORY, *FINE_TUNING, *WORKFLOWS]
