"""Several virtual CPU devices in one process: the settings of jax and XLA."""

import os

import jax

IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def use_cpu_devices(count: int) -> None:
    """Gives jax's CPU backend `count` devices, and XLA the threads and the scheduler that such devices need.

    Call it before the first jax operation of the process; a second call with the same count does nothing. It sets
    `jax_num_cpu_devices`; it sets `NPROC`, where it is not set, to two threads per device, without which XLA hangs once
    some 32 steps are dispatched ahead of their results; and it adds a flag to `XLA_FLAGS` that makes it rarer that
    collectives meet each other on a machine that does other work as well, which `zero.in_order` around a pmapped
    function prevents (docs/decisions/virtual-devices.md). On a machine with an accelerator set `JAX_PLATFORMS=cpu` too.

    Raises:
      RuntimeError: jax has started its backends already, so the settings would have no effect.

    >>> jax.device_count()
    8
    >>> use_cpu_devices(4)
    Traceback (most recent call last):
    RuntimeError: use_cpu_devices(4) comes too late: jax has started its devices; call it before any jax operation
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if IN_ORDER in flags and jax.config.values["jax_num_cpu_devices"] == count:
        return
    try:
        for value in (count + 1, count):  # jax accepts the value that it has even when it is too late
            jax.config.update("jax_num_cpu_devices", value)
    except RuntimeError as error:
        raise RuntimeError(
            f"use_cpu_devices({count}) comes too late: jax has started its devices; call it before any jax operation"
        ) from error
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * count)))
    if IN_ORDER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {IN_ORDER}".strip()
