import pytest
import torch

from benchmarks import complete, image_students, render_image_students
from recipes_lib.core.data.images import Images
from tests.benchmarks.test_record import machine_facts


def a_run(taught=(45, 46, 47)):
    seeds = []
    for seed, wrong in enumerate(taught):
        few = {"labels": 200, "teacher": 140 + seed}
        student = {"labels": 50, "teacher": wrong}
        seeds.append({"seed": seed, "teacher": 40, "student": student, "few": few})
    settings = {"train": 3000, "test": 2000, "few": 1000, "width": 0.5, "few_width": 0.25}
    times = {
        "milliseconds": {"teacher": [2.0] * 5, "student": [1.0] * 5},
        "multiply_adds": {"teacher": 500, "student": 200},
    }
    return {
        "short": False,
        "settings": settings | {"seeds": 3},
        "seeds": seeds,
        "times": times,
    }


def test_wrong_answers_are_those_of_other_classes():
    """The mistake: right answers are counted, and every difference has the other sign."""
    images = Images(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 1, 1]))

    class AlwaysOne(torch.nn.Module):
        def forward(self, batch):
            return torch.tensor([[0.0, 1.0]]).expand(len(batch), 2)

    assert image_students.wrong(AlwaysOne(), images) == 1


def test_a_run_that_was_cut_is_not_complete():
    """The mistake: two of three seeds are read as the whole comparison."""
    run = a_run()
    assert complete.lacking_in_image_students(run) == []
    assert complete.lacking_in_image_students(run | {"short": True}) == ["the run without --short"]
    cut = run | {"seeds": run["seeds"][:-1]}
    assert complete.lacking_in_image_students(cut) == ["the seed 2"]
    del run["times"]
    assert complete.lacking_in_image_students(run) == ["the part times"]
    assert set(complete.IMAGE_STUDENTS) == set(image_students.PARTS)


@pytest.mark.parametrize(
    ("taught", "said"),
    [((45, 46, 47), "-4 (-5 to -3) | better"), ((45, 46, 50), "-3 (-5 to +0) | undecided")],
)
def test_the_run_in_words_and_numbers(taught, said):
    """The mistake: three seeds that do not agree are called better."""
    text = render_image_students.block(machine_facts() | a_run(taught))
    assert f" | {said} |" in text
    assert "| teacher | 3,000 labels | 40 | 40 | 40 | 40 |" in text
    assert "2.00× (2.00 to 2.00) as fast. It has 2.5 times fewer multiply-adds" in text
    assert f"({(2000 - taught[2]) / 1960:.1%} to {1955 / 1960:.1%}) as many right answers" in text
    assert "Test CPU" in text
    assert render_image_students.block(None) == render_image_students.students(None) == ""
    cell = render_image_students.few_images(a_run(taught))
    assert cell == "1,000 images: 200 of 2,000 wrong, with a teacher -59 (-60 to -58): better"
