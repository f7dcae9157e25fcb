import torch

from benchmarks import image_students
from recipes_lib.core.data.images import Images


def test_wrong_answers_are_those_of_other_classes():
    """The mistake: right answers are counted, and every difference has the other sign."""
    images = Images(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 1, 1]))

    class AlwaysOne(torch.nn.Module):
        def forward(self, batch):
            return torch.tensor([[0.0, 1.0]]).expand(len(batch), 2)

    assert image_students.wrong(AlwaysOne(), images) == 1
