"""WebDataset's names over Penstock's reader, storages and codecs; they are looked up in their modules when used."""

from importlib import import_module
from typing import Any

__version__ = "1.0.2"  # whose names these are

_NAMES = {
    "autodecode": "Continue Decoder DecodingError ImageHandler gzfilter handle_extension imagehandler "
    "pytorch_weights_only torch_audio torch_loads torch_video",
    "cache": "LRUCleanup cached_tarfile_samples cached_tarfile_to_samples pipe_cleaner",
    "compat": "ChoppedDataset Dataset FluidInterface FluidWrapper MockDataset PytorchShardList ResizedDataset "
    "WebDataset WebLoader with_epoch with_length",
    "filters": "Cached associate batched decode default_collation_fn detshuffle extract_keys getfirst map map_dict "
    "map_tuple pipelinefilter rename rename_keys rsample select shuffle slice to_tuple transform_with unbatched "
    "unlisted xdecode",
    "gopen": "gopen_schemes",
    "handlers": "ignore_and_continue ignore_and_stop reraise_exception warn_and_continue warn_and_stop",
    "mix": "RandomMix RoundRobin",
    "pipeline": "DataPipeline",
    "pytorch": "",
    "shardlists": "ResampledShards SimpleShardList non_empty resampled shardspec single_node_only split_by_node "
    "split_by_worker",
    "tariterators": "ShardError base_plus_ext tarfile_samples tarfile_to_samples",
    "tenbin": "",
    "utils": "PipelineStage repeatedly trust",
    "writer": "ShardWriter TarWriter numpy_dumps torch_dumps",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_NAMES, *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: its guide lists the names there are")


def __dir__() -> list[str]:
    return sorted(__all__)
