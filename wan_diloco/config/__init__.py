"""What a run is: the schema, and the layers (defaults, files, environment, flags) that it is read from.

Nothing here imports torch, so that a laptop can check the configuration of a cluster.
"""

from wan_diloco.config.environment import DEBUG_VARIABLE, process_environment, quiet_grpc
from wan_diloco.config.faults import (
    FaultKind,
    FaultSchedule,
    FaultSettings,
    check_schedule,
    load_schedule,
    parse_schedule,
)
from wan_diloco.config.load import LoadedConfig, load_config, load_stored, parse_config
from wan_diloco.config.rates import Adopted, LiveConfig, adopt_rates
from wan_diloco.config.render import json_schema, render_toml
from wan_diloco.config.resumption import FREE_KEYS, check_shards, keep_shards, require_resumable
from wan_diloco.config.schema import (
    DataSettings,
    EvaluationSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RegionSettings,
    RunConfig,
    RunSettings,
    SyncerSettings,
    SyncSettings,
    UnlistedSettings,
    WireSettings,
)
from wan_diloco.config.sources import text_path

__all__ = [
    "DEBUG_VARIABLE",
    "FREE_KEYS",
    "Adopted",
    "DataSettings",
    "EvaluationSettings",
    "FaultKind",
    "FaultSchedule",
    "FaultSettings",
    "InnerSettings",
    "LiveConfig",
    "LoadedConfig",
    "ModelSettings",
    "OuterSettings",
    "RegionSettings",
    "RunConfig",
    "RunSettings",
    "SyncSettings",
    "SyncerSettings",
    "UnlistedSettings",
    "WireSettings",
    "adopt_rates",
    "check_schedule",
    "check_shards",
    "json_schema",
    "keep_shards",
    "load_config",
    "load_schedule",
    "load_stored",
    "parse_config",
    "parse_schedule",
    "process_environment",
    "quiet_grpc",
    "render_toml",
    "require_resumable",
    "text_path",
]
