"""The short form of a trial, for the default tests: of `verify` only what should catch the mutant."""

import dataclasses
from typing import Any


def caught_quickly(way: str | None, config: Any) -> tuple[str, str]:
    """How a mutant, which is planted, is caught that should be in this way, and what is said: "nothing" if it is not.
    Without a way everything is checked."""
    import jax

    from megajax.program.communication import collectives_of
    from megajax.program.program import Program
    from megajax.program.train_step import train_step_with_gradients
    from megajax.verify.check import one_device
    from megajax.verify.traffic import check_collectives

    if way == "numbers" and config.mesh.pipe == 1:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
    with jax.enable_x64(True):
        program = Program.on(config, jax.devices()[: config.mesh.num_devices])
        if way != "numbers":
            traced = train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
            finding = check_collectives(config, collectives_of(traced.jaxpr))
            if not finding.passed:
                return "communication", finding.where
        if way in (None, "numbers"):
            plain = one_device(config)
            reference = _gradients(Program.on(plain, jax.devices()[:1]))
            worst = _worst(reference, _gradients(program))
            if worst:
                return "numbers", worst
    return "nothing", ""


def _gradients(program: Any) -> dict[str, Any]:
    """The loss and all gradients of a batch, in mesh-independent form."""
    import jax
    import numpy as np

    from megajax.mesh import shardings
    from megajax.program.synthetic import random_batch
    from megajax.program.train_step import loss_and_gradients
    from megajax.verify.gradient_run import named_leaves
    from megajax.verify.initial import drawn_weights

    layout, weights = program.layout, drawn_weights(program)
    pipelined = weights | {"blocks": jax.tree.map(layout.placement.to_stages, weights["blocks"])}
    params = jax.device_put(pipelined, shardings(layout.mesh, layout.specs.params))
    batch = program.put_batch(random_batch(program.config, 0), list(range(program.config.train.global_batch)))
    loss, gradients = loss_and_gradients(program)(params, batch, np.int32(0))
    return {"loss": np.asarray(loss)} | named_leaves(layout.canonical_weights(jax.device_get(gradients)))


def _worst(expected: dict[str, Any], actual: dict[str, Any]) -> str:
    """What differs most; nothing if all is as one device has it."""
    import numpy as np

    size = max(float(np.linalg.norm(value)) for value in expected.values())
    errors = {name: float(np.linalg.norm(actual[name] - value)) for name, value in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    return "" if errors[worst] <= 1e-12 * size else f"{worst}: {errors[worst] / size:.1e}"
