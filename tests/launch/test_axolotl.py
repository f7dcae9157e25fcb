"""launch/axolotl: the course's trainings, by Axolotl's keys and, where it is there, by itself.

For the whole check:

    pip install --no-deps --target /tmp/axolotl axolotl==0.19.0 addict
    AXOLOTL=/tmp/axolotl pytest tests/launch/test_axolotl.py
"""

import json
import os
import sys

import pytest
import yaml

from tests.launch.record_axolotl_keys import RECORD
from tests.launch.scripts import LAUNCH, ROOT, run

pytestmark = pytest.mark.survey
FILES = sorted((LAUNCH / "axolotl").glob("*.yaml"))
AXOLOTL = os.environ.get("AXOLOTL")
VALIDATE = """
import sys, yaml
sys.path.insert(0, sys.argv[1])
from axolotl.utils.config import validate_config
from axolotl.utils.dict import DictDefault
print("valid", validate_config(DictDefault(yaml.safe_load(open(sys.argv[2])))).sequence_len)
"""


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


@pytest.mark.skipif(AXOLOTL is None, reason="AXOLOTL names no folder with Axolotl in it")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_axolotl_takes_the_file(path):
    code, printed = run([sys.executable, "-c", VALIDATE, AXOLOTL, path])
    assert code == 0, printed
    assert f"valid {content(path)['sequence_len']}" in printed
