"""What the README and the other pages promise is there: commands run, paths and links resolve."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from recipes_lib.cli.app import main
from recipes_lib.core.model import SHAPES, model_of_shape
from recipes_lib.core.model.default_model import resolve
from recipes_lib.fine_tuning.qlora import quantized_layers
from tools import file_map

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
# Everything that is written for readers.
LAUNCH_PAGE = ROOT / "launch" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), LAUNCH_PAGE]
# Made by commands, not part of the repository.
GENERATED = ("runs/", "lab/", ".venv")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(path: Path) -> list[list[str]]:
    """The words of every command in the fenced shell blocks, without comments."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", text(path), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").replace("&&", "\n").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line for line in words if line]


COMMANDS = [line for page in PAGES for line in commands(page)]
MAKE = [line for line in COMMANDS if line[0] == "make"]
PYTHON_M = [line for line in COMMANDS if line[:3] == ["python", "-m", "recipes_lib"]]


def test_make_targets_exist():
    """The mistake: a target is renamed, and a page names the old one."""
    for line in MAKE:
        dry = [line[0], "--dry-run", *line[1:]]
        done = subprocess.run(dry, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.fixture(scope="module")
def small_default_model(tmp_path_factory):
    """A cache folder whose "smollm2" has two narrow layers, and the tokenizer of the real one.

    The lines of the pages then run as they are written, in seconds. That the real model loads is
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
    arguments = [word.replace("runs/", f"{tmp_path}/") for word in arguments]
    # A step of billions of weights takes a minute to predict, and another shape the same way.
    arguments = ["tiny-llama" if word in SHAPES else word for word in arguments]
    if arguments[0] == "bench":
        arguments += ["--batch-size", "2", "--seq-len", "32"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code, ended.value.code


def test_the_package_is_a_program():
    """The lines above ran in this process: here is one as a shell starts it."""
    line = next(line for line in PYTHON_M if line[3:] == ["list"])
    done = subprocess.run(
        [sys.executable, *line[1:]], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "fine_tuning/lora.py" in done.stdout


def launch_commands() -> list[list[str]]:
    """The words of every command in the page of `launch/`, which stand in a table and in lines."""
    spans = re.findall(r"`([^`\n]+)`", text(LAUNCH_PAGE))
    lines = [shlex.split(span) for span in spans if " " in span]
    return [words for words in lines if any(word.startswith("launch/") for word in words)]


def test_launch_examples_name_files_and_options_that_exist():
    """tests/launch runs the scripts. Here: the lines of the page would start them as written."""
    for words in launch_commands():
        files = [word for word in words if word.startswith("launch/")]
        assert all((ROOT / file).is_file() for file in files), files
        script = files[-1]
        assert os.access(ROOT / script, os.X_OK) or words[0] != script, f"{script} does not start"
        source = text(ROOT / script)
        if script.endswith((".sh", ".sbatch")):
            source += text(ROOT / "launch" / "train.py")  # to which they hand their options
        options = [word for word in words[words.index(script) :] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == [], words
        variables = [word.partition("=")[0] for word in words if re.match(r"[A-Z]+=", word)]
        assert [name for name in variables if name not in source] == [], words


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(path), re.S | re.M)


def test_the_example_of_the_readme_trains(monkeypatch, small_default_model):
    """As it is written: adapters get gradients, the base is in four bits, no logits are made."""
    monkeypatch.setenv("RECIPES_CACHE", str(small_default_model))
    (example,) = python_blocks(README)
    names: dict = {}
    exec(example, names)
    model = names["model"]
    tokens = torch.arange(24, device=model.device).reshape(2, 12)  # [B, S]
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    assert output.loss.isfinite()
    assert output.logits is None
    assert quantized_layers(model)
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert trained
    assert [name for name in trained if "lora_" not in name] == []


def test_the_lines_against_running_out_of_memory_run(monkeypatch, small_default_model, capsys):
    """As they are written: the doctor names what fits, and a step with its recipes is taken."""
    monkeypatch.setenv("RECIPES_CACHE", str(small_default_model))
    names: dict = {}
    for block in python_blocks(ROOT / "docs" / "out-of-memory.md"):
        exec(block, names)
    assert "fits" in capsys.readouterr().out
    assert names["loss"] > 0


def repository_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.name not in (".git", ".venv", "runs", "lab")]
    return top + [below for path in top if path.is_dir() for below in path.rglob("*")]


def test_paths_in_the_pages_exist():
    """The mistake: a file moves, and a page names its old place."""
    inside = re.compile(r"^[\w.-]+(/[\w.-]+)*/?$")
    endings = (".py", ".md", ".ipynb", ".txt", ".toml", ".yml", "/")
    # A page may give a path below a folder that it has named, so the end of a path is enough.
    known = [f"/{path.relative_to(ROOT).as_posix()}" for path in repository_files()]
    missing = []
    for page in PAGES:
        for token in set(filter(inside.match, re.findall(r"`([^`\n]+)`", text(page)))):
            is_path = token.endswith(endings) or (ROOT / token.split("/")[0]).is_dir()
            exists = any(path.endswith("/" + token.rstrip("/")) for path in known)
            if is_path and not exists and not token.startswith(GENERATED):
                missing.append(f"{page.name}: {token}")
    assert missing == []


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.+)$", text(path), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip()).replace(" ", "-") for heading in plain}


def test_links_and_pictures_resolve():
    """The mistake: a heading gets other words, and the link to it leads nowhere."""
    broken = []
    for page in PAGES:
        links = re.findall(r"\]\(<?([^)>\s]+)", text(page))
        links += re.findall(r'(?:src|srcset)="([^"]+)"', text(page))
        for link in links:
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if re.match(r"\w+:", link):
                continue
            has_anchor = not anchor or target.suffix != ".md" or anchor in anchors(target)
            if not target.exists() or not has_anchor:
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_a_marked_number_does_not_begin_a_line():
    """A line that begins with a comment is HTML for GitHub: its **bold** would show its stars."""
    for page in PAGES:
        wrong = re.findall(r"^(?:> )?<!--m .*", text(page), re.MULTILINE)
        assert wrong == [], page.name


def test_no_page_speaks_of_results_that_do_not_exist():
    """An empty place says nothing: no heading, no excuse."""
    for page in PAGES:
        words = re.findall(r"not measured|no such run|is recorded yet", text(page).lower())
        assert words == [], page.name


def test_the_file_map_is_of_today():
    assert text(file_map.MAP) == file_map.file_map(), "run: make texts"


def test_every_address_of_this_repository_is_the_one_of_pyproject():
    """The mistake: a link that somebody wrote with an address of before."""
    name = "llm-training-recipes"
    here = re.compile(
        rf"github\.com/([\w-]+/{name})\b"
        r"|colab\.research\.google\.com/github/([\w-]+/[\w.-]+?)/blob"
        r"|git clone [^\n]*github\.com/([\w-]+/[\w.-]*\w)"
    )
    settings = text(ROOT / "pyproject.toml")
    present = re.search(r'^Repository = "https://github\.com/([^"]+)"$', settings, re.M)[1]
    others = []
    for path in repository_files():
        if path.is_file() and path.suffix in (".md", ".py", ".ipynb", ".toml", ".yml"):
            for found in here.finditer(text(path)):
                address = "".join(part or "" for part in found.groups())
                if address != present:
                    others.append(f"{path.relative_to(ROOT)}: {address}")
    assert others == []
