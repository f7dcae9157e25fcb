"""The README.md of a result: what was trained on what, what it has reached, and how to ask it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes_lib.core.measure.provenance import provenance
from recipes_lib.core.model.default_model import model_source
from recipes_lib.fine_tuning.honest_evaluation import RowLosses
from recipes_lib.workflows.finetune.held_out_loss import difference_of
from recipes_lib.workflows.finetune.settings import Settings

CARD = """---
{head}pipeline_tag: text-generation
---

# {name}

- {what}, trained for {steps} steps of {rows_per_step} rows.
- Base: {base}.
- Data: {data}, {rows:,} rows to train on.

| held-out loss, nats per token | |
|---|--:|
| before | {before:.4f} |
| after | {after:.4f} |

{difference}

## Ask it

```python
{use}
```

## The command

```bash
{command}
```

{versions}
"""


def model_card(
    run: Settings,
    *,
    base: str,
    rows: int,
    tokenizer: Any,
    pair: Mapping[str, Any],
    before: RowLosses,
    after: RowLosses,
) -> str:
    """The text of README.md, the model card, as the hub shows it.

    Args:
        base: the hub id of the base model, or its folder.
        rows: how many rows were trained on.
        pair: one of them, as text.
    """
    head = ""
    name_of_base = without_place(base)
    # A folder of this machine says nothing elsewhere.
    if name_of_base == base and not Path(base).exists():
        head += f"base_model: {base}\n"
    if run.base_model == "smollm2":
        name_of_base += f", from the {model_source()}"
    what = "All weights"
    if run.method != "full":
        head += "library_name: peft\n"
        what = f"Adapters of rank {run.rank} ({run.method})"
    data = "functions of Python's standard library, with their docstrings"
    if run.data_files:
        data = ", ".join(f"`{Path(file).name}`" for file in run.data_files)
    facts = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return CARD.format(
        head=head,
        name=Path(run.output_dir).name,
        what=what,
        steps=run.steps,
        rows_per_step=run.rows_per_step,
        base=name_of_base,
        data=data,
        rows=rows,
        before=before.mean,
        after=after.mean,
        difference=difference_of(before, after, run=run),
        use=lines_that_generate(
            run, base=without_place(run.base_model), folder=".", tokenizer=tokenizer, pair=pair
        ),
        command=_command_of(run),
        versions=f"{versions}, {facts['date']}.",
    )


def _command_of(run: Settings) -> str:
    """On the card: the command line of this process, if it is the command."""
    if Path(sys.argv[0]).parent.name != "recipes_lib":
        return "# A program called finetune(settings)."
    program = "python -m recipes_lib"
    if run.processes > 1:
        program = f"torchrun --nproc-per-node {run.processes} -m recipes_lib"
    return " ".join([program, *map(without_place, sys.argv[1:])])


def without_place(word: Any) -> str:
    """On the card: a path by its last name, also behind an option: "--data=pairs.jsonl"."""
    option, equals, value = str(word).rpartition("=")
    if Path(value).expanduser().is_absolute():
        value = Path(value).name
    return f"{option}{equals}{value}"


# --- how to ask the result ------------------------------------------------------------------------

ASK = """from recipes_lib.core.model import load_model, load_tokenizer
{imports}
tokenizer = load_tokenizer("{folder}")
model = {model}
{ids}
tokens = model.generate(**ids.to(model.device), max_new_tokens=200)[0]
print(tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True))"""
IDS = """turns = {turns}
ids = tokenizer.apply_chat_template(
    turns,{tools} add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""


def lines_that_generate(
    run: Settings, *, base: str, folder: str, tokenizer: Any, pair: Mapping[str, Any]
) -> str:
    """On the card: code that asks the trained model with its template, or by a text.

    Args:
        pair: one of those to train on; the system turn with which it begins is asked with, too.
    """
    imports = ""
    model = f'load_model("{folder}")'
    if run.method != "full":
        imports = "from recipes_lib.fine_tuning.adapter_files import load_adapter\n"
        model = f'load_adapter(load_model("{base}"), "{folder}").eval()'
    if "text" in pair:
        ids = 'ids = tokenizer("How a text begins", return_tensors="pt")'
    elif tokenizer.chat_template:
        system = [turn for turn in pair.get("messages", [])[:1] if turn["role"] == "system"]
        turns = [*system, {"role": "user", "content": "Your question"}]
        tools = " tools=[],  # those of your data\n   " if "tools" in pair else ""
        ids = IDS.format(turns=json.dumps(turns, ensure_ascii=False), tools=tools)
    else:  # its pairs are a question, an empty line and the answer
        ids = 'ids = tokenizer("Your question\\n\\n", return_tensors="pt")'
    return ASK.format(imports=imports, folder=folder, model=model, ids=ids)
