"""What the README and its companions promise is there: commands run, paths and links resolve."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from recipes_lib.cli.app import main
from recipes_lib.core.default_model import resolve
from recipes_lib.core.model import model_of_shape
from tests.test_architecture import owner

ROOT = Path(__file__).resolve().parents[1]
README, CHEATSHEET, CONTRIBUTING = (
    ROOT / f"{name}.md" for name in ("README", "CHEATSHEET", "CONTRIBUTING")
)
# Made by commands, not part of the repository.
GENERATED = ("runs/", ".venv/")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def commands(path: Path) -> list[list[str]]:
    """The words of every command in the fenced shell blocks, without comments."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", text(path), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").replace("&&", "\n").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line for line in words if line]


MAKE = [line for line in commands(README) if line[0] == "make"]
PYTHON_M = [
    line
    for line in commands(README) + commands(CHEATSHEET)
    if Path(line[0]).name in ("python", "python3") and line[1:3] == ["-m", "recipes_lib"]
]


def test_readme_shows_the_main_commands():
    assert {"run", "test", "lab", "gpu"} <= {word for line in MAKE for word in line[1:]}
    assert PYTHON_M, "no python -m recipes_lib …"


@pytest.mark.parametrize("line", MAKE, ids=" ".join)
def test_make_targets_exist(line):
    dry = [line[0], "--dry-run", *line[1:]]
    done = subprocess.run(dry, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def small_default_model(tmp_path_factory):
    """A cache folder whose "smollm2" has two narrow layers, and the tokenizer of the real one.

    The lines of the README then run as they are written, in seconds. That the real model loads is
    tested in tests/core, and the notebooks run the same commands with it.
    """
    cache = tmp_path_factory.mktemp("cache")
    real = Path(resolve("smollm2"))
    small = cache / real.name
    shutil.copytree(real, small, ignore=shutil.ignore_patterns("*.safetensors"))
    config = model_of_shape("smollm2-135m", layers=2, device="meta").config
    config.update({"hidden_size": 64, "intermediate_size": 160, "head_dim": 8})
    config.update({"num_attention_heads": 8, "num_key_value_heads": 2})
    LlamaForCausalLM(config).save_pretrained(small)
    return cache


@pytest.mark.parametrize("line", PYTHON_M, ids=" ".join)
def test_command_line_examples_run(line, tmp_path, monkeypatch, small_default_model):
    monkeypatch.setenv("RECIPES_CACHE", str(small_default_model))
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    monkeypatch.setenv("RECIPES_FAST", "1")
    monkeypatch.chdir(ROOT)
    _python, _m, _package, *arguments = line
    with pytest.raises(SystemExit) as ended:
        main([word.replace("runs/", f"{tmp_path}/") for word in arguments])
    assert not ended.value.code, ended.value.code


def test_the_package_is_a_program():
    """The lines above ran in this process: here is one as a shell starts it."""
    line = next(line for line in PYTHON_M if line[3:] == ["list"])
    done = subprocess.run(
        [sys.executable, *line[1:]], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "fine_tuning/lora.py" in done.stdout


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(path), re.S | re.M)


def test_python_examples_import_what_exists():
    """A moved file would leave an import line that fails for every reader."""
    missing = []
    for block in python_blocks(README):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                absent = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                missing += [f"{node.module}.{name}" for name in absent]
    assert missing == []


def repository_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.name not in (".git", ".venv", "runs")]
    return top + [below for path in top if path.is_dir() for below in path.rglob("*")]


def test_paths_in_the_readme_exist():
    inside = re.compile(r"^[\w.-]+(/[\w.-]+)*/?$")
    tokens = {token for token in re.findall(r"`([^`\n]+)`", text(README)) if inside.match(token)}
    paths = {
        token
        for token in tokens
        if token.endswith((".py", ".md", ".ipynb", ".txt", ".toml", ".yml", "/"))
        or (ROOT / token.split("/")[0]).is_dir()
    }
    # A file map may give a path below its folder's heading, so the end of a path is enough.
    known = [f"/{path.relative_to(ROOT).as_posix()}" for path in repository_files()]
    missing = [
        token
        for token in paths
        if not token.startswith(GENERATED)
        and not any(path.endswith("/" + token.rstrip("/")) for path in known)
    ]
    assert missing == []


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.+)$", text(path), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", [README, CHEATSHEET, CONTRIBUTING], ids=lambda path: path.name)
def test_links_resolve(path):
    assert path.exists()
    broken = []
    for link in re.findall(r"\]\(<?([^)>\s]+)", text(path)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    assert broken == []


def test_file_map_lists_every_file():
    """All but the parts of a technique, which have its name in front."""
    every_file = (ROOT / "recipes_lib").rglob("[!_]*.py")
    files = [path.name for path in every_file if owner(path) == path]
    absent = [file for file in files if not re.search(rf"\b{re.escape(file)}", text(README))]
    assert absent == []
