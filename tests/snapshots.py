"""What a technique could have changed, before and after."""

import copy

import torch


def snapshot(model):
    """What a technique could have changed: classes, attributes and hooks of modules, weights."""
    modules = []
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key != "training"}
        shallow = {key: copy.copy(value) for key, value in attributes.items()}
        modules.append((name, type(module), shallow))
    weights = [
        (
            name,
            id(parameter),
            parameter.requires_grad,
            parameter.detach().clone(),
            dict(vars(parameter)),
        )
        for name, parameter in model.named_parameters()
    ]
    return modules, weights


def assert_unchanged(model, before):
    modules, weights = before
    now_modules, now_weights = snapshot(model)
    assert [entry[:2] for entry in now_modules] == [entry[:2] for entry in modules]
    for (name, _, attributes), (_, _, now) in zip(modules, now_modules):
        assert now.keys() == attributes.keys(), name
        for key, value in attributes.items():
            if isinstance(value, dict):  # hooks, parameters, buffers and children
                assert list(now[key]) == list(value), f"{name}.{key}"
            if isinstance(value, int | float | str):
                assert now[key] == value, f"{name}.{key}"
    assert [entry[:3] for entry in now_weights] == [entry[:3] for entry in weights]
    for (name, *_, value, marks), (*_, now, now_marks) in zip(weights, now_weights):
        assert torch.equal(now, value), name
        assert now_marks == marks, name
