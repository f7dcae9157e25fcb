"""Does a model that learned the task of notebook 05 still answer ordinary questions?

python -m benchmarks.own_answers

The run of the notebook, with other seeds. In some ways each step also has an ordinary question with
what the pretrained model answered to it. Other questions judge: how many are answered in the braces
of the task, and how many capitals are named.
"""

from __future__ import annotations

from functools import partial

from benchmarks import study
from benchmarks.fine_tuning_seeds import Settings, Task, Way, compare
from recipes_lib.core.data.reminder_task import reminder_pairs

OWN_ANSWERS = Task(
    "own_answers",
    reminder_pairs,
    {
        "full fine-tuning": Way("none", 3e-5, 2),
        "full fine-tuning, with own answers": Way("none", 3e-5, 2, own_answers=True),
        "full fine-tuning, with own answers, longer": Way("none", 3e-5, 4, own_answers=True),
        "LoRA": Way("lora", 3e-4, 2, rank=4),
        "LoRA, longer": Way("lora", 3e-4, 4, rank=4),
        "LoRA, small rate, longer": Way("lora", 1e-4, 4, rank=4),
        "LoRA, with own answers": Way("lora", 3e-4, 2, rank=4, own_answers=True),
        "LoRA, with own answers, longer": Way("lora", 3e-4, 4, rank=4, own_answers=True),
        "LoRA, small rate, with own answers, longer": Way(
            "lora", 1e-4, 4, rank=4, own_answers=True
        ),
        "QLoRA": Way("qlora", 3e-4, 2, rank=4),
    },
)

if __name__ == "__main__":
    settings = Settings(pairs=288, rows=3, seeds=(1, 2))
    study.run("own_answers", settings, partial(compare, task=OWN_ANSWERS), about=__doc__, threads=2)
