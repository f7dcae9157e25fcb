"""launch/accelerate: accelerate reads every key, starts the ranks, and does what the file says."""

import os
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate import Accelerator, PartialState
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command_parser,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.launch.one_process import OPTIONS, losses_alone
from tests.launch.scripts import FORKED_ACCELERATE, LAUNCH, ROOT, load, losses_in, run

FOLDER = LAUNCH / "accelerate"
FILES = sorted(FOLDER.glob("*.yaml"))
SCRIPT = "launch/train_with_accelerate.py"
# The file is for 8 GPUs that compute in bf16; a free port is chosen.
ON_TWO_CPUS = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
OF_ACCELERATE = ("ACCELERATE_", "FSDP_")
WORDS = [*OPTIONS, "--steps", "2", "--ranks", "2"]


def test_accelerate_knows_every_key():
    """Its class refuses unknown keys of the file, and takes those of the parts without a word."""
    known = set(vars(launch_command_parser().parse_args([SCRIPT])))
    for path in FILES:
        ClusterConfig.from_yaml_file(str(path))
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        parts = [part for part in config.values() if isinstance(part, dict)]
        assert [key for part in parts for key in part if key not in known] == [], path.name
        # The file of DeepSpeed is looked for when a cluster has been waited for.
        file = config.get("deepspeed_config", {}).get("deepspeed_config_file", path)
        assert (ROOT / file).is_file(), path.name


# --- started by accelerate ------------------------------------------------------------------------


def test_ddp_on_cpu_ranks():
    command = [*FORKED_ACCELERATE, "--config_file", FOLDER / "ddp.yaml", *ON_TWO_CPUS]
    code, printed = run([*command, SCRIPT, *WORDS], ACCELERATE_USE_CPU="true")
    assert code == 0, printed
    assert losses_in(printed) == pytest.approx(losses_alone(2), abs=1e-5)


# --- what the files say, on ranks that are there already ------------------------------------------


def variables_of(name, *more):
    """What `accelerate launch` would put into the environment of the ranks."""
    words = ["--config_file", str(FOLDER / name), *ON_TWO_CPUS, *more, SCRIPT]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        fields = ",".join(defaults.deepspeed_config)
        arguments.deepspeed_fields_from_accelerate_config = fields
        _, variables = prepare_deepspeed_cmd_env(arguments)
    else:
        variables = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in variables.items() if key.startswith(OF_ACCELERATE)}


def train_with(variables, gpu):
    """On a rank: the losses under these variables. With `gpu`, accelerate takes the CPU for one."""
    rank = str(torch.distributed.get_rank())
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    script = load("train_with_accelerate")
    with patch.dict(os.environ, variables | of_torchrun | {"DS_ACCELERATOR": "cpu"}):
        try:
            return train_here(script, gpu)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def train_here(script, gpu):
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if deepspeed and gpu:
        from deepspeed.ops import __compatible_ops__ as compatible

        # Compiled when a process needs it, which takes minutes. PyTorch's gloo does the same.
        compatible["deepspeed_shm_comm"] = False
    if gpu:
        PartialState(cpu=True)
        if not deepspeed:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=not gpu)
    script.guards.require_what_accelerate_promised(accelerator)
    return script.train(script.read_options(WORDS), accelerator)


def test_fsdp_does_what_its_file_says(two_ranks):
    losses = two_ranks.run(train_with, variables=variables_of("fsdp2.yaml"), gpu=True)
    assert losses == pytest.approx(losses_alone(2), abs=1e-5)


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero3"])
def test_what_accelerate_switches_off_is_refused(two_ranks, name):
    """On CPU ranks it goes on with DDP, and says nothing."""
    with pytest.raises(ValueError, match="accelerate has chosen MULTI_CPU"):
        two_ranks.run(train_with, variables=variables_of(f"{name}.yaml"), gpu=False)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_deepspeed_does_what_its_file_says(two_ranks):
    """Stage 3 draws random weights in another way: it can be compared with trained ones only."""
    file = ["--deepspeed_config_file", str(LAUNCH / "deepspeed" / "zero2.json")]
    variables = variables_of("deepspeed_zero3.yaml", *file)
    losses = two_ranks.run(train_with, variables=variables, gpu=True)
    assert losses == pytest.approx(losses_alone(2), abs=1e-5)
