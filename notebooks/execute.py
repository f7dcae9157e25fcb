"""Build the notebooks from notebooks/source and execute them, cell by cell.

python notebooks/execute.py run 01      when all its cells have run, it goes to runs/
python notebooks/execute.py build all   and to notebooks/, too
python notebooks/execute.py prose 01    only the text, or the code that `show` shows, changed:
                                        take it over, keep all other outputs
"""

from __future__ import annotations

import argparse
import ast
import os
import pkgutil
import re
import signal
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from recipes_lib.report import show

NOTEBOOKS = Path(__file__).resolve().parent
ROOT = NOTEBOOKS.parent
RUNS = ROOT / "runs"


class ThisPython(AsyncKernelManager):
    """A kernel in this very interpreter, whatever kernels the machine has registered."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv += ["--log-level=CRITICAL"]  # what fails in a cell arrives as a message, not as a log
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


class LiveClient(NotebookClient):
    """Prints what a cell prints as soon as it arrives: a long cell shows how far it is."""

    silent = True  # nothing printed yet below the current cell's title

    def process_message(self, msg, cell, cell_index):
        content = msg["content"]
        if msg["msg_type"] == "stream":
            self.echo(content["text"])
        elif msg["msg_type"] in ("display_data", "execute_result"):
            data = content["data"]
            if "image/png" not in data and "text/plain" in data:
                self.echo(data["text/plain"] + "\n")
        return super().process_message(msg, cell, cell_index)

    def echo(self, text: str) -> None:
        print("\n" * self.silent + text, end="", flush=True)
        self.silent = False


def build(source: Path) -> NotebookNode:
    """The notebook of a text source, without outputs, the same bytes on every machine."""
    nb = jupytext.read(source)
    nb.metadata.pop("jupytext", None)
    nb.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nb.metadata.language_info = {"name": "python"}
    for index, cell in enumerate(nb.cells):
        cell.id = f"cell-{index:02d}"
    return nb


def title(cells: list[NotebookNode], index: int) -> str:
    """The last heading above a code cell."""
    above = cells[index - 1] if index else cells[0]
    text = above.source if above.cell_type == "markdown" else ""
    lines = re.sub("```.*?```", "", text, flags=re.DOTALL).splitlines()  # no comments of its code
    headings = [line.lstrip("# ") for line in lines if line.startswith("#")]
    if headings:
        return headings[-1]
    return title(cells, index - 1) if index else ""


def run_cells(nb: NotebookNode, path: Path) -> None:
    """Execute every code cell and save the notebook after each."""
    client = LiveClient(
        nb,
        timeout=None,
        kernel_manager_class=ThisPython,
        coalesce_streams=True,
        record_timing=False,  # timestamps would make every build differ
    )
    client.reset_execution_trackers()
    # As if the environment were activated, so that a cell's `!command` finds its tools.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    code = [index for index, cell in enumerate(nb.cells) if cell.cell_type == "code"]
    # Progress bars without ipywidgets are text bars: the warning on every import says no more.
    env = os.environ | {"PATH": search, "PYTHONWARNINGS": "ignore:IProgress not found"}
    with client.setup_kernel(cwd=str(NOTEBOOKS), env=env):
        for number, index in enumerate(code, 1):
            print(f"[{number:2}/{len(code)}] {title(nb.cells, index):.70}", end="", flush=True)
            client.silent = True
            start = time.perf_counter()
            client.execute_cell(nb.cells[index], index)
            print(f"{'' if client.silent else '       '}  {time.perf_counter() - start:.1f} s")
            save(nb, path)


def save(nb: NotebookNode, path: Path) -> None:
    """Write without what names this machine, in one step: an interrupted write changes nothing."""
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop("application/vnd.jupyter.widget-view+json", None)
            for holder in (output, data):
                for kind in {"text", "text/plain", "text/html", "text/markdown"} & holder.keys():
                    local = holder[kind].replace(f"{ROOT}/", "")
                    holder[kind] = local.replace(str(Path.home()), "~")
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    nbformat.write(nb, part)
    part.replace(path)


def execute(source: Path) -> tuple[NotebookNode, int]:
    """Run one notebook into runs/; returns it with the exit status.

    Until all its cells have run, it has another name: a run that fails leaves an earlier one as it
    was.
    """
    nb, path, status = build(source), RUNS / f"{source.stem}.ipynb", 0
    unfinished = path.with_name(f"{source.stem}.unfinished.ipynb")
    print(f"{source.stem}: {len(nb.cells)} cells")
    begin = time.time()
    try:
        run_cells(nb, unfinished)
    except KeyboardInterrupt:
        print("\nInterrupted.")
        status = 130
    except CellExecutionError as error:
        print(f"\n{error}")
        status = 1
    except DeadKernelError:
        print("\nThe kernel process died. Most often that means: out of memory.")
        status = 1
    save(nb, unfinished)
    if status:
        print(f"As far as it came: {unfinished.relative_to(ROOT)} ({time.time() - begin:.0f} s)")
        return nb, status
    unfinished.replace(path)
    print(f"Executed notebook: {path.relative_to(ROOT)} ({time.time() - begin:.0f} s)")
    rows = path.with_suffix(".json")
    if rows.exists() and rows.stat().st_mtime >= begin:
        print(f"Measured rows:     {rows.relative_to(ROOT)}")
    return nb, status


def refresh_prose(source: Path) -> None:
    """Take over changed text and shown code, and keep the outputs; only where no code changed."""
    nb, path = build(source), NOTEBOOKS / f"{source.stem}.ipynb"
    new = [cell for cell in nb.cells if cell.cell_type == "code"]
    old = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    if [cell.source for cell in new] != [cell.source for cell in old]:
        sys.exit(f"{source.stem}: code changed, so it has to run again (build)")
    for cell, done in zip(new, old):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
    for cell, codes in shown_code(nb):
        refresh_shown(cell, codes, path)
    save(nb, path)


# --- what `show` shows ----------------------------------------------------------------------------


def shown_code(nb: NotebookNode) -> list[tuple[NotebookNode, list[str]]]:
    """The cells that call `show`, each with the code that its calls would show today."""
    imports: dict[str, str] = {}  # where each name of the package is from, so far
    found = []
    for cell in nb.cells:
        if cell.cell_type != "code" or not can_be_parsed(cell.source):
            continue
        nodes = list(ast.walk(ast.parse(cell.source)))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("recipes_lib"):
                for alias in node.names:
                    imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        shows = [call for call in calls if ast.unparse(call.func) == "show"]
        if shows:
            found.append((cell, [code_of(call, imports) for call in shows]))
    return found


def code_of(call: ast.Call, imports: dict[str, str]) -> str:
    """What `show(loop.training_steps)` shows, if `loop` was imported from the package."""
    functions = []
    for argument in call.args:
        name, *attributes = ast.unparse(argument).split(".")
        if name not in imports:
            raise ValueError(f"show({name}): it is not imported from recipes_lib by this name")
        function = pkgutil.resolve_name(imports[name])
        for attribute in attributes:
            function = getattr(function, attribute)
        functions.append(function)
    return show.shown(*functions)


def can_be_parsed(code: str) -> bool:
    """Whether a cell is plain Python: one with a `!command` or a `%magic` is not."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def refresh_shown(cell: NotebookNode, codes: list[str], path: Path) -> None:
    """Put today's code into the outputs of a cell that calls `show`."""
    blocks = [output for output in cell.outputs if is_code_block(output)]
    if len(blocks) == len(codes):
        for block, code in zip(blocks, codes):
            block.data.update(show.in_markdown(code))
    elif outdated(cell, codes):
        sys.exit(f"{path.stem}: {cell.id} has printed older code, so it has to run again (build)")


def outdated(cell: NotebookNode, codes: list[str]) -> list[str]:
    """Which of `codes` the outputs of a cell do not show. Empty lines do not matter."""
    shown = "\n".join(without_empty_lines(output_text(output)) for output in cell.outputs)
    return [code for code in codes if without_empty_lines(code) not in shown]


def output_text(output: NotebookNode) -> str:
    """What an output shows as text: a stream, or every text form of a displayed value."""
    displayed = [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join([output.get("text", ""), *displayed])


def without_empty_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


def is_code_block(output: NotebookNode) -> bool:
    return output.get("data", {}).get("text/markdown", "").startswith("```python")


def pick(which: str) -> list[Path]:
    """The sources named by `all`, a number or the start of a name."""
    sources = sorted((NOTEBOOKS / "source").glob("*.py"))
    prefix = "" if which == "all" else which.zfill(2)
    chosen = [source for source in sources if source.stem.startswith(prefix)]
    if not chosen:
        names = "\n".join(f"  {source.stem}" for source in sources)
        sys.exit(f"There is no notebook {which!r}. Choose from:\n{names}")
    return chosen


def stop(*_) -> None:
    """First Ctrl-C or SIGTERM: save and leave. Further ones must not break the saving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "build", "prose"])
    parser.add_argument("notebook", help="a number, the start of a name, or all")
    options = parser.parse_args()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for source in pick(options.notebook):
        if options.command == "prose":
            refresh_prose(source)
            continue
        nb, status = execute(source)
        if status:
            sys.exit(status)
        if options.command == "build":
            save(nb, NOTEBOOKS / f"{source.stem}.ipynb")


if __name__ == "__main__":
    main()
