"""Fake copy of a model: the same modules with parameters without data, no hooks and no wrappers.

It is built from the model's attributes without calling the model. The module inside DDP, FSDP 1, DeepSpeed and
torch.compile is copied. FSDP 2 and tensor parallelism work through hooks, which the copy lacks, and through DTensor
parameters, which have their global shape in the copy.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import copy
import functools
import types
from collections import OrderedDict, deque
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flopwatch.training.flop_counter.operators import Counter
from flopwatch.training.flop_counter.results import Uncountable
from flopwatch.training.torch.graphed import uncaptured
from flopwatch.training.torch.waits import fsdp_groups

MAX_ITEMS = 10_000  # elements of a list in a module: more are a data set


def cut_parameters(model: torch.nn.Module) -> dict[int, tuple[int, int]]:
    """Return (dimension, parts) by id of the parameters that tensor parallelism shards, without the shards of FSDP."""
    data_parallel = {}
    for group in fsdp_groups(model):
        for parameter in group.fsdp_params:
            data_parallel[id(parameter.sharded_param)] = group.mesh_info.mesh.ndim
    parts = {}
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        for axis in range(data_parallel.get(id(parameter), 0), 0 if mesh is None else mesh.ndim):
            placement = parameter.placements[axis]  # type: ignore[attr-defined]
            if placement.is_shard():
                parts[id(parameter)] = (placement.dim, mesh.size(axis))
    return parts


class FakeModels:
    """Maker of fake copies of models, with parameters and buffers without data, and without hooks and wrappers."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._modules: dict[int, Any] = {}
        self._configs: dict[int, Any] = {}
        self._objects: dict[int, Any] = {}
        self._whole: dict[tuple[int, str], torch.Tensor] = {}  # parameters that FSDP 1 cut up

    def of(self, model: torch.nn.Module) -> Any:
        """Return the fake copy of a model. Raises Uncountable for TorchScript."""
        twin = self._module(model)
        for module in list(self._modules.values()):
            state = module.__dict__
            for name, value in state.items():
                state[name] = self._attribute(value)
        return twin

    def clear(self) -> None:
        """Release the tensors of all copies."""
        for twin in self._modules.values():
            twin.__dict__.clear()
        self._whole.clear()

    def _module(self, module: torch.nn.Module) -> Any:
        module = self._unwrapped(module)
        if id(module) in self._modules:
            return self._modules[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            raise Uncountable(f"{module.original_name} is TorchScript, whose operators the counter does not see")
        twin = object.__new__(type(module))
        self._modules[id(module)] = twin
        state = dict(module.__dict__)
        for name, value in state.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                state[name] = OrderedDict()
        state["_compiled_call_impl"] = None
        if "forward" in state:
            state["forward"] = uncaptured(state["forward"])  # a graph's replay would run on the device
        # No recomputation in the forward: Hugging Face's blocks read this attribute.
        if state.get("gradient_checkpointing") is True:
            state["gradient_checkpointing"] = False
        weights = dict(state["_parameters"])
        for (owner, name), whole in self._whole.items():
            if owner == id(module):
                weights[name] = whole
                state.pop(name, None)
        weight_of = functools.partial(self._counter.fake, weight=True)
        for kind, parts, copy_of in (
            ("_parameters", weights, weight_of),
            ("_buffers", state["_buffers"], self._counter.fake),
            ("_modules", state["_modules"], self._module),
        ):
            state[kind] = {name: None if part is None else copy_of(part) for name, part in parts.items()}
        twin.__dict__.update(state)
        return twin

    def _unwrapped(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the model inside its wrappers, whose forward does more than the model's."""
        while True:
            inner = module.__dict__["_modules"]
            known = (kind for kind in type(module).__mro__ if kind.__module__.startswith(("torch.", "deepspeed.")))
            kinds = {kind.__name__ for kind in known}
            if "OptimizedModule" in kinds:
                module = inner["_orig_mod"]
            elif kinds & {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}:
                module = inner["module"]
            elif "FullyShardedDataParallel" in kinds:
                self._restore(module)
                module = inner["_fsdp_wrapped_module"]
            else:
                return module

    def _restore(self, module: Any) -> None:
        """Store tensors without data in the original shapes of parameters that this FSDP 1 module flattened and cut."""
        flat = None if module._handle is None else module._handle.flat_param
        if flat is None:
            return
        for i, (name, owner, _) in enumerate(flat._param_infos):
            needs = flat._params[i].requires_grad if flat._params is not None else flat.requires_grad
            whole = torch.empty(flat._shapes[i], dtype=flat.dtype, device="meta", requires_grad=needs)
            self._whole[id(owner), name] = whole
        for name, owner, _, first, first_owner, _ in flat._shared_param_infos:
            self._whole[id(owner), name] = self._whole[id(first_owner), first]

    def _attribute(self, value: Any) -> Any:
        """Return a copy of an attribute's value, with fake tensors and fake modules in place of the model's."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            return self._counter.fake(value)
        if isinstance(value, torch.nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, types.MethodType):
            owner = self._modules.get(id(value.__self__))
            return value if owner is None else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            named = {name: self._attribute(item) for name, item in value.keywords.items()}
            return functools.partial(self._attribute(value.func), *map(self._attribute, value.args), **named)
        if type(value) in (dict, OrderedDict, list, tuple, deque, set):
            if len(value) > MAX_ITEMS:
                return value  # data
            if isinstance(value, dict):
                return type(value)((key, self._attribute(item)) for key, item in value.items())
            return type(value)(map(self._attribute, value))
        if hasattr(value, "_attn_implementation") and hasattr(value, "_experts_implementation"):
            return self._config(value)
        kept = isinstance(value, (type, types.ModuleType, types.FunctionType, Enum))
        if not kept and type(value).__module__ != "builtins" and type(getattr(value, "__dict__", None)) is dict:
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        """Return a copy of an object, with its own lists, dicts and tensors. Other objects inside stay the model's."""
        if id(value) not in self._objects:
            try:
                twin = object.__new__(type(value))
            except TypeError:
                return value  # an extension type
            self._objects[id(value)] = twin
            for name, item in value.__dict__.items():
                copied = isinstance(item, (torch.Tensor, list, dict, set, deque))
                twin.__dict__[name] = self._attribute(item) if copied else item
        return self._objects[id(value)]

    def _config(self, config: Any) -> Any:
        """Return a copy of a Hugging Face configuration that selects kernels whose matmuls can be counted."""
        if id(config) not in self._configs:
            twin = self._configs[id(config)] = copy.copy(config)
            if twin._attn_implementation not in (None, "eager", "sdpa"):
                able = all(getattr(module, "_supports_sdpa", True) for module in self._modules.values())
                twin._attn_implementation = "sdpa" if able else "eager"
                self._counter.packs = True
            if twin._experts_implementation is not None:
                twin._experts_implementation = "grouped_mm"  # each token passes through its own experts
        return self._configs[id(config)]
