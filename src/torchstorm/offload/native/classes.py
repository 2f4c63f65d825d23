"""What the C++ makes and reads of Python's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils._device import DeviceContext

from torchstorm.memory.host import HostHandle, HostTier
from torchstorm.offload.recompute import replay, watched
from torchstorm.offload.recompute.described import NOTHING, Unfinished, is_given_again
from torchstorm.offload.recompute.operators import Operator, product
from torchstorm.offload.recompute.repeats import CHOICES, LONG_WAY, Record
from torchstorm.offload.recompute.tensors import tensors_of
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.step.kept import Kept, KeptStorage, KeptTensors
from torchstorm.offload.step.known import SavedStorages
from torchstorm.offload.step.packed import Placeholder, Untouched, is_own_thread
from torchstorm.offload.step.parcels import TINY_BYTES, Call, Chain, Leaf, Parcel, Ref, Saved, Value, label_of
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.running import Running
from torchstorm.offload.step.settled import Settled
from torchstorm.offload.step.views import View, WeakStorage, content_of
from torchstorm.transfer.engine import CudaCopy, Engine, Queue
from torchstorm.transfer.pinned import PinnedArena, Slot
from torchstorm.transfer.runtime import Event, Events, Runtime


def classes() -> Mapping[str, object]:
    """By the names in objects.h."""
    return {
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "kept": Kept,
        "kept_storage": KeptStorage,
        "placeholder": Placeholder,
        "untouched": Untouched,
        "view": View,
        "ref": Ref,
        "unfinished": Unfinished,
        "running": Running,
        "value": Value,
        "record": Record,
        "call": Call,
        "operation": Operator,
        "saved": Saved,
        "saved_tensors": SavedTensors,
        "settled": Settled,
        "chain": Chain,
        "parcel": Parcel,
        "weak": WeakStorage,
        "leaf": Leaf,
        "device_context": DeviceContext,
        "watched_calls": watched.WatchedCalls,
        "residency": Residency,
        "kept_tensors": KeptTensors,
        "saved_storages": SavedStorages,
        "host_tier": HostTier,
        "host_handle": HostHandle,
        "arena": PinnedArena,
        "slot": Slot,
        "engine": Engine,
        "queue": Queue,
        "cuda_copy": CudaCopy,
        "event": Event,
        "events": Events,
        "runtime": Runtime,
        "is_given_again": is_given_again,
        "run_again": replay.run,
        "product": product,
        "label_of": label_of,
        "apply": torch.autograd.Function.apply.__code__,
        "is_own_thread": is_own_thread,
        "long_way": LONG_WAY,
        "nothing": NOTHING,
        "no_block": "",
        "choices": CHOICES,
        "uint8": torch.uint8,
        "content_of": content_of,
        "tensors_of": tensors_of,
        "getter": watched.GETTER,
        "known_functions": watched.KNOWN,
        "get_to_know": watched.get_to_know,
        "is_plain": watched.is_plain,
        "compiler": vars(torch.compiler),
        "forward_ad": vars(torch.autograd.forward_ad),
        "torch_function": watched.WatchedCalls.__torch_function__,
        "num_names": watched.NAMES,
        "num_counts": watched.COUNTS,
        "num_places": watched.PLACES,
        "tiny_bytes": TINY_BYTES,
    }
