"""What training stores between steps: parameters, buffers and the state of optimizers, taken to the host and put into another workload.

For a workload that is made anew in the middle of a comparison: with this it goes on bit for bit, and whatever it kept anywhere else is
gone. `load_state_dict` of an optimizer would cast its state to the dtype of its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwitness.compare.workload import Workload
from bitwitness.errors import ConfigurationError
from bitwitness.faults.sites import buffers_of, parameters_of


@dataclass(frozen=True)
class Stored:
    """What was stored.

    Attributes:
        tensors: parameters and buffers by name, on the host.
        optimizers: of each optimizer, state by the name of its parameter, and the options of its groups.
    """

    tensors: Mapping[str, Tensor]
    optimizers: tuple[tuple[dict[str, dict[str, Any]], list[dict[str, Any]]], ...]

    @classmethod
    def of(cls, workload: Workload) -> Stored:
        """What a workload stores now."""
        parameters = parameters_of(workload.model)
        named = {id(parameter): name for name, parameter in parameters.items()}
        tensors = {name: _host(one) for name, one in (parameters | buffers_of(workload.model)).items()}
        optimizers = []
        for optimizer in workload.all_optimizers:
            state = {
                named[id(parameter)]: {key: _kept(value) for key, value in values.items()}
                for parameter, values in optimizer.state.items()
                if id(parameter) in named
            }
            options = [
                {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
            ]
            optimizers.append((state, options))
        return cls(tensors, tuple(optimizers))

    def put_back(self, workload: Workload) -> None:
        """Into one that was made anew.

        Raises:
            ConfigurationError: it has other parameters, buffers or optimizers than the first had.
        """
        parameters = parameters_of(workload.model)
        there = parameters | buffers_of(workload.model)
        if there.keys() != self.tensors.keys() or len(workload.all_optimizers) != len(self.optimizers):
            raise ConfigurationError(
                "the workload has other parameters, buffers or optimizers when it is made a second time: its maker must make the same "
                "however often it is called"
            )
        for name, tensor in there.items():
            tensor.data.copy_(self.tensors[name])
        for optimizer, (state, options) in zip(workload.all_optimizers, self.optimizers, strict=True):
            for name, values in state.items():
                optimizer.state[parameters[name]] = {key: _back(value) for key, value in values.items()}
            for group, given in zip(optimizer.param_groups, options, strict=True):
                group.update(given)


@dataclass(frozen=True)
class _Elsewhere:
    """A tensor that was on a device."""

    device: torch.device
    copy: Tensor


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", copy=True)


def _kept(value: Any) -> Any:
    return _Elsewhere(value.device, _host(value)) if isinstance(value, Tensor) else copy.deepcopy(value)


def _back(value: Any) -> Any:
    return value.copy.to(device=value.device, copy=True) if isinstance(value, _Elsewhere) else value
