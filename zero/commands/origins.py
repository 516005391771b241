"""Where a configuration starts from: a run that it resumes or uses, a Hugging Face folder, or nothing but its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from zero.base.errors import UserError
from zero.base.keys import shown
from zero.commands.modes import merge_resumed
from zero.config.check import Sizes
from zero.config.files import literal
from zero.job.sizes import load_sizes
from zero.record.run_files import saved_config, split_step
from zero.run.find_run import trained_run


class Filled(NamedTuple):
    """A configuration with the keys that its origin decides.

    Attributes:
      sizes: where the size of the model is found.
    """

    config: DictConfig
    sizes: Sizes


class Origin(NamedTuple):
    """A kind of origin.

    Attributes:
      fits: whether a configuration names such an origin.
      fill: sets its keys, except for those that the overrides have set. Raises UserError for keys that exclude it.
    """

    fits: Callable[[DictConfig], bool]
    fill: Callable[[DictConfig, list[str]], Filled]


def filled(config: DictConfig, overrides: list[str]) -> Filled:
    """The configuration with the keys that its origin decides.

    Raises:
      UserError: a key selects a run and is of another type, or the origin cannot be used.
    """
    check_keys(config)
    origin = next((origin for origin in ORIGINS if origin.fits(config)), None)
    if origin is None:
        return Filled(config, sizes_of(config))
    return origin.fill(config, overrides)


def check_keys(config: DictConfig) -> None:
    """Raises UserError for keys that select an origin, or their sections, of another type.

    They are read before all others, which are validated when the origin is known.
    """
    for name in ("model", "data", "evaluate"):
        if name in config and not isinstance(config[name], DictConfig):
            raise UserError(f"{name}={shown(config[name])}: expected a section of keys")
    for key in ("resume", "model.model_path"):
        value = OmegaConf.select(config, key)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{key}={value}: expected a path, or null")


def sizes_of(config: DictConfig) -> Sizes:
    """Where the size of the model is found: in files, or in a Hugging Face folder that it names."""
    size = OmegaConf.select(config, "model.size")  # None if it is missing, which the check says
    if isinstance(size, str) and is_folder(size):
        from zero.exchange.hub_model import sizes_named  # the import takes a second, and runs do not need it

        return sizes_named(size)
    return load_sizes()


def is_folder(place: str | None) -> bool:
    """Whether a place is a Hugging Face folder or repository, rather than a run."""
    return place is not None and (place.startswith("hf:") or (Path(place) / "config.json").is_file())


def keys_of(overrides: Sequence[str]) -> list[str]:
    """The keys that overrides set.

    >>> keys_of(["model.size=1b", "+preset=v3-8"])
    ['model.size', 'preset']
    """
    return [override.lstrip("+~").partition("=")[0] for override in overrides]


def _resumes(config: DictConfig) -> bool:
    return config.resume is not None


def _resumed_run(config: DictConfig, overrides: list[str]) -> Filled:
    merged = merge_resumed(saved_config(Path(config.resume)), config, overrides)
    return Filled(merged, sizes_of(merged))


def _uses_model(config: DictConfig) -> bool:
    return config.mode in ("evaluate", "sample")


def _uses_folder(config: DictConfig) -> bool:
    return _uses_model(config) and is_folder(config.model.model_path)


def _folder(config: DictConfig, overrides: list[str]) -> Filled:
    """Raises UserError also for a key that names what only a run has.

    A folder has no validation set; the default one of training belongs to another tokenizer.
    """
    from zero.exchange.hub_model import open_hf_model  # as above

    folder = open_hf_model(config.model.model_path)
    assert folder is not None  # as it fits
    given = keys_of(overrides)
    for key, value in (("data.resume_step", None), ("evaluate.follow", False)):
        if OmegaConf.select(config, key) not in (value, None):
            raise UserError(f"{key}={OmegaConf.select(config, key)}: {folder.path} is not a run and has no checkpoints")
    config.model.model_path = literal(str(folder.path))
    if "data.index_path_validation" not in given:
        config.data.index_path_validation = None
    if "data.tokenizer" not in given:
        config.data.tokenizer = literal(folder.tokenizer())
    if "data.max_context" not in given:
        config.data.max_context = min(config.data.max_context or folder.size.block_size, folder.size.block_size)
    return Filled(config, folder)


def _trained_run(config: DictConfig, overrides: list[str]) -> Filled:
    waits = config.mode == "evaluate" and config.evaluate.follow is True
    _use_step(config)
    config.model.model_path = literal(str(trained_run(config.model.model_path, waits)))
    saved = saved_config(Path(config.model.model_path))
    merged = merge_resumed(saved, config, [*overrides, "model.model_path", "data.resume_step"])
    return Filled(merged, sizes_of(merged))


def _use_step(config: DictConfig) -> None:
    """Sets the run and the step of `model.model_path=RUN@STEP`.

    Raises:
      UserError: another key excludes a step.
    """
    named = config.model.model_path
    run, step = (None, None) if named is None else split_step(named)
    if step is None:
        return
    if config.data.resume_step is not None:
        raise UserError(f"data.resume_step={config.data.resume_step}: expected null, as model.model_path={named}")
    if config.mode == "evaluate" and config.evaluate.follow:
        raise UserError(f"model.model_path={named}: expected a run without a step, as evaluate.follow=true")
    config.model.model_path = literal(run)
    config.data.resume_step = step


def _starts_from_folder(config: DictConfig) -> bool:
    return bool(config.model.warm_start) and is_folder(config.model.model_path)


def _base_folder(config: DictConfig, overrides: list[str]) -> Filled:
    """Size and tokenizer of a run are those of the folder, unless its size is given."""
    given = keys_of(overrides)
    if "model.size" in given:
        return Filled(config, sizes_of(config))
    from zero.exchange.hub_model import open_hf_config  # as above

    place = config.model.model_path
    folder = open_hf_config(place)
    assert folder is not None
    config.model.size = literal(folder.name)
    if place.startswith("hf:"):
        config.model.model_path = literal(folder.name)
    if "data.tokenizer" not in given:
        config.data.tokenizer = literal(folder.tokenizer())
    elif "model.override.vocab_size" not in given and "model.override" not in given:
        config.model.override = folder.override_for(config.data.tokenizer)
    return Filled(config, sizes_of(config))


# The first that fits; a configuration that none fits has nothing but its keys.
ORIGINS = (
    Origin(_resumes, _resumed_run),
    Origin(_uses_folder, _folder),
    Origin(_uses_model, _trained_run),
    Origin(_starts_from_folder, _base_folder),
)
