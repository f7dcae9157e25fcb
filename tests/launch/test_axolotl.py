"""launch/axolotl: the course's trainings, by the keys that Axolotl knows."""

import json

import pytest
import yaml

from tests.launch.record_axolotl_keys import RECORD
from tests.launch.scripts import LAUNCH, ROOT

FILES = sorted((LAUNCH / "axolotl").glob("*.yaml"))


def content(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def unknown_keys(config):
    """Keys that Axolotl does not know, as it would not say: those of the file and of its parts."""
    keys = json.loads(RECORD.read_text(encoding="utf-8"))["keys"]
    known = {where: set(names.split()) for where, names in keys.items()}
    parts = [("", config)]
    parts += [(name, config[name]) for name in ("fsdp_config", "special_tokens") if name in config]
    for dataset in config["datasets"]:
        parts.append(("datasets", dataset))
        if isinstance(dataset["type"], dict):
            parts.append(("datasets.type", dataset["type"]))
    return [f"{where} {key}".strip() for where, part in parts for key in set(part) - known[where]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_axolotl_knows_every_key(path):
    assert unknown_keys(content(path)) == []


def test_the_key_of_the_course_is_not_one():
    """Axolotl takes it without a word, and trains with rows of 512 tokens."""
    config = content(FILES[0]) | {"sequence_length": 1024}
    assert unknown_keys(config) == ["sequence_length"]


def test_both_trainings_of_the_course_are_there():
    adapters = {config["adapter"]: config for config in map(content, FILES)}
    assert set(adapters) == {"lora", "qlora"}
    assert adapters["lora"]["sequence_len"] == 2048
    assert adapters["qlora"]["sequence_len"] == 1024
    assert adapters["qlora"]["load_in_4bit"] is True
    assert (ROOT / adapters["lora"]["deepspeed"]).is_file()
