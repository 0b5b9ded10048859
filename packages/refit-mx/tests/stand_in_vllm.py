"""What of vLLM a weight-transfer engine touches, without vLLM, which needs CUDA.

`provide` puts modules named ``vllm...`` in place: the abstract engine and the factory, in the
newest form or the older one. Names, arguments and order of calls are vLLM's. `stand_in_vllm_server`
serves a model with them.
"""

from __future__ import annotations

import importlib
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass

from stand_in_model import TinyForCausalLM, checkpoint

from refit_mx.engine.phases import Step, UpdatePhases
from refit_mx.errors import PhaseError


def _interface(generation):
    class Parsing:
        def parse_init_info(self, init_dict):
            try:
                return self.init_info_cls(**init_dict)
            except TypeError as error:
                raise ValueError(f"Invalid init_info for {type(self).__name__}: {error}") from error

        def parse_update_info(self, update_dict):
            try:
                return self.update_info_cls(**update_dict)
            except TypeError as error:
                raise ValueError(
                    f"Invalid update_info for {type(self).__name__}: {error}"
                ) from error

    @dataclass
    class WeightTransferInitInfo(ABC):  # noqa: B024
        pass

    if generation == "new":

        @dataclass
        class WeightTransferUpdateInfo(ABC):  # noqa: B024
            pass

        class WeightTransferEngine(Parsing, ABC):
            init_info_cls: type
            update_info_cls: type
            supports_draft_weight_update = True
            defers_processing = False

            def __init__(self, config, vllm_config, device, model):
                self.config = config
                self.vllm_config = vllm_config
                self.device = device
                self.model = model

            @abstractmethod
            def init_transfer_engine(self, init_info): ...

            @abstractmethod
            def start_weight_update(self): ...

            @abstractmethod
            def receive_weights(self, update_info): ...

            @abstractmethod
            def finish_weight_update(self): ...

            @abstractmethod
            def shutdown(self): ...

            def update_weights(self, update_info):
                self.receive_weights(self.parse_update_info(update_info))

    else:

        @dataclass
        class WeightTransferUpdateInfo(ABC):  # noqa: B024
            is_checkpoint_format: bool = True

        class WeightTransferEngine(Parsing, ABC):
            init_info_cls: type
            update_info_cls: type

            def __init__(self, config, parallel_config):
                self.config = config
                self.parallel_config = parallel_config

            @abstractmethod
            def init_transfer_engine(self, init_info): ...

            @abstractmethod
            def receive_weights(self, update_info, load_weights): ...

            @abstractmethod
            def shutdown(self): ...

            @staticmethod
            @abstractmethod
            def trainer_send_weights(iterator, trainer_args): ...

    return WeightTransferInitInfo, WeightTransferUpdateInfo, WeightTransferEngine


def _factory():
    class WeightTransferEngineFactory:
        _registry = {}  # noqa: RUF012

        @classmethod
        def register_engine(cls, name, module_path_or_cls, class_name=None):
            if name in cls._registry:
                raise ValueError(f"Weight transfer engine '{name}' is already registered.")
            if isinstance(module_path_or_cls, str):
                if class_name is None:
                    raise ValueError("class_name is required with a module path")
                cls._registry[name] = lambda: getattr(
                    importlib.import_module(module_path_or_cls), class_name
                )
            else:
                cls._registry[name] = lambda: module_path_or_cls

        @classmethod
        def create_engine(cls, config, *arguments):
            if config.backend not in cls._registry:
                raise ValueError(
                    f"Invalid weight transfer backend: {config.backend}. "
                    f"Available engines: {list(cls._registry)}"
                )
            return cls._registry[config.backend]()(config, *arguments)

    return WeightTransferEngineFactory


def provide(generation="new"):
    """Put ``vllm`` modules in place; gives the factory. Forgets adapters made for earlier ones."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("refit_mx.engine.vllm", None)
    init_info, update_info, engine = _interface(generation)
    names = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngine": engine},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferInitInfo": init_info,
            "WeightTransferUpdateInfo": update_info,
            "WeightTransferEngine": engine,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": _factory()},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    factory = sys.modules["vllm.distributed.weight_transfer.factory"].WeightTransferEngineFactory
    sys.modules["vllm.distributed.weight_transfer"].WeightTransferEngineFactory = factory
    return factory


def seeded_engine():
    """An engine whose version ``v<n>`` is `checkpoint` of seed n, for tests without a network."""
    base = sys.modules["vllm.distributed.weight_transfer.base"]

    @dataclass
    class SeededInitInfo(base.WeightTransferInitInfo):
        rank_offset: int = 0

    @dataclass
    class SeededUpdateInfo(base.WeightTransferUpdateInfo):
        version_id: str = ""
        abort: bool = False
        check: bool = False

    class SeededEngine(base.WeightTransferEngine):
        init_info_cls = SeededInitInfo
        update_info_cls = SeededUpdateInfo

        def __init__(self, config, vllm_config, device, model):
            super().__init__(config, vllm_config, device, model)
            self.phases, self.info, self.staged = UpdatePhases(), None, None
            self.received, self.version_id, self.tear = "", "", False

        def init_transfer_engine(self, init_info):
            if self.info == init_info:
                return
            with self.phases.step(Step.INIT):
                self.info = init_info

        def start_weight_update(self):
            with self.phases.step(Step.START):
                pass

        def receive_weights(self, update_info):
            if update_info.check:
                self.phases.check()
                if update_info.version_id != self.version_id:
                    raise PhaseError(f"{self.version_id!r}; expected {update_info.version_id!r}")
                return
            with self.phases.step(Step.ABORT if update_info.abort else Step.RECEIVE):
                self.staged, self.received = None, update_info.version_id
                if not update_info.abort:
                    embed = self.model.model.embed_tokens
                    rank = self.vllm_config.parallel_config.rank
                    self.staged = TinyForCausalLM(self.model.config, embed.tp_size, rank)
                    seed = int(update_info.version_id.removeprefix("v"))
                    self.staged.load_weights(checkpoint(self.model.config, seed).items())

        def finish_weight_update(self):
            with self.phases.step(Step.FINISH):
                self.phases.touch_live_weights()
                staged = dict(self.staged.named_parameters())
                for name, live in self.model.named_parameters():
                    if self.tear and name == "model.norm.weight":
                        self.tear = False
                        raise OSError("the install of a test fails half way")
                    live.copy_(staged[name])
                self.version_id = self.received

        def shutdown(self):
            with self.phases.step(Step.SHUTDOWN):
                self.staged = None

    return SeededEngine
