"""Names without wrappers, tied weights once, nothing uninitialised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wan_diloco.algorithm.fragments import read_fragment, write_fragment
from wan_diloco.algorithm.layout import MergeRule, build_layout
from wan_diloco.algorithm.parameters import canonical_name, tensor_specs, unique_parameters
from wan_diloco.errors import ConfigError


class Tied(nn.Module):
    """An output layer that shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(100, 8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.lm_head = nn.Linear(8, 100, bias=False)
        self.lm_head.weight = self.wte.weight


class Wrapper(nn.Module):
    """Wraps as torch's wrappers do, under a name of choice."""

    def __init__(self, name, inner):
        super().__init__()
        self.add_module(name, inner)


def stack():
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 2)]), "norm": nn.LayerNorm(3)})


def fingerprint(module):
    specs = tensor_specs(unique_parameters(module))
    return build_layout(specs, num_fragments=2, merge=MergeRule.RDA).fingerprint()


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.w",
        "module._orig_mod.layers.0.w",
        "_orig_mod.module.layers.0.w",
        "module.module.layers.0.w",
        "layers.0._orig_mod.w",
        "layers.0._fsdp_wrapped_module.w",
        "_fsdp_wrapped_module._orig_mod.layers._fsdp_wrapped_module.0._checkpoint_wrapped_module.w",
    ],
)
def test_wrappers_leave_no_trace_in_a_name(name):
    assert canonical_name(name) == "layers.0.w"


def test_a_users_submodule_called_module_keeps_its_name():
    assert canonical_name("encoder.module.w") == "encoder.module.w"
    assert canonical_name("module.encoder.module.w") == "encoder.module.w"
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})})
    assert [name for name, _ in unique_parameters(model)] == ["encoder.module.weight"]
    outermost = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2, bias=False)})
    assert [name for name, _ in unique_parameters(outermost)] == ["module.weight", "other.weight"]


def test_a_name_of_wrappers_only_is_an_error():
    with pytest.raises(ConfigError):
        canonical_name("_orig_mod")


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: Wrapper("_orig_mod", nn.DataParallel(model)),
        lambda model: nn.DataParallel(Wrapper("_orig_mod", model)),
        lambda model: Wrapper("_fsdp_wrapped_module", model),
    ],
    ids=["parallel", "compiled parallel", "parallel compiled", "fsdp"],
)
def test_wrapped_and_plain_models_have_the_same_fingerprint(wrap):
    assert fingerprint(wrap(stack())) == fingerprint(stack())


def test_a_block_compiled_or_checkpointed_by_itself_has_the_same_fingerprint():
    model = stack()
    model["layers"][0] = Wrapper("_orig_mod", Wrapper("_checkpoint_wrapped_module", model["layers"][0]))
    assert fingerprint(model) == fingerprint(stack())


def test_compiled_model_has_the_names_of_the_plain_one():
    assert fingerprint(torch.compile(stack(), backend="eager")) == fingerprint(stack())


def test_tied_weights_appear_once_and_are_stepped_once():
    model = Tied()
    named = unique_parameters(model)
    layout = build_layout(tensor_specs(named), num_fragments=2, merge=MergeRule.MEAN)
    assert [name for name, _ in named] == ["wte.weight", "mix.weight"]
    assert sum(fragment.numel for fragment in layout.fragments) == 864
    tensors = dict(named)
    before = model.lm_head.weight.detach().clone()
    for fragment in layout.fragments:
        write_fragment(fragment, tensors, read_fragment(fragment, tensors) - 1.0)
    assert torch.equal(model.lm_head.weight, before - 1.0)
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()


def test_weights_tied_by_storage_rather_than_by_parameter_appear_once():
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(4, 3))
    model.second = nn.Parameter(model.first.detach().view(3, 4))
    assert model.first is not model.second
    assert [name for name, _ in unique_parameters(model)] == ["first"]


def test_parameters_that_share_a_part_of_their_storage_are_refused():
    storage = torch.zeros(10)
    model = nn.Module()
    model.first = nn.Parameter(storage[:6])
    model.second = nn.Parameter(storage[4:])
    with pytest.raises(ConfigError, match=r"first.*second"):
        unique_parameters(model)
    model.second = nn.Parameter(storage[6:])
    assert len(unique_parameters(model)) == 2


def test_two_parameters_with_one_name_are_refused():
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    model._orig_mod = nn.Module()
    model._orig_mod.w = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError) as caught:
        unique_parameters(model)
    assert caught.value.where == "w"


def test_frozen_parameters_do_not_take_part():
    model = stack()
    model["norm"].requires_grad_(requires_grad=False)
    assert [name for name, _ in unique_parameters(model)] == ["layers.0.weight", "layers.0.bias"]


def test_parameters_without_elements_are_told_apart():
    model = nn.Module()
    model.first, model.second = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.zeros(0, 4))
    assert len(unique_parameters(model)) == 2


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_left_on_meta_is_an_error_that_names_it(kind):
    model = stack()
    if kind == "parameter":
        model["norm"].weight = nn.Parameter(torch.zeros(3, device="meta"))
    else:
        model["norm"].register_buffer("weight_mean", torch.zeros(3, device="meta"))
    with pytest.raises(ConfigError, match=r"norm\.weight.*meta"):
        unique_parameters(model)


def test_names_and_shapes_can_be_had_without_values():
    with torch.device("meta"):
        model = Tied()
    specs = tensor_specs(unique_parameters(model, allow_meta=True))
    assert specs == tensor_specs(unique_parameters(Tied()))
