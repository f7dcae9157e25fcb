"""What an export writes in which dtype. The rest, on ranks, is in test_checkpoint."""

import torch
from safetensors.torch import load_file

from recipes_lib.core.model.kept_in_fp32 import kept_in_fp32
from recipes_lib.parallel.checkpoint.export import export_safetensors
from tests.families.configs import quiet, tiny_model


def test_what_a_family_keeps_in_fp32_is_written_so(tmp_path):
    """The mistake: a model that was cast as a whole left its routers in bf16 in the file."""
    with quiet():
        model = tiny_model("hy_v4").to(torch.bfloat16)
        export_safetensors(tmp_path, model=model, dtype=torch.bfloat16)
    saved = {}
    for file in tmp_path.glob("*.safetensors"):
        saved |= load_file(file)
    in_fp32 = {name for name, tensor in saved.items() if tensor.dtype is torch.float32}
    assert in_fp32
    assert in_fp32 == kept_in_fp32(model, torch.bfloat16)
