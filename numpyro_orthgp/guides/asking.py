"""How a model asks its guide for Gaussians: those that the guide hides in fits, and those of guides of other packages.

A belief lets a fit integrate over q; ``posterior`` reads q after a fit. A belief always carries q. Its ``analytic`` says whether
a fit integrates over q. Its ``asked`` says that the caller wants everything the guide knows: ``posterior``, and so ``check``,
``online`` and ``infer_latents``. The Gaussians of guides of other packages come from their sites (``guides/gaussians.py``). If a
Gaussian is joint with other sites, it is conditioned on their draws, so mixing over keys gives the guide itself. A set stays a
draw if it correlates with another set or if another site depends on its draw; ``GPFunction.drawn`` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_orthgp.gaussians.family import Diagonal, Whitened
from numpyro_orthgp.guides.gaussians import flat_gaussians, gaussian_of, read_by_others
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, InputBelief, input_site_of, site_of

__all__ = ["Answers", "Asking"]

Trace = dict[str, dict[str, Any]]


class Answers:
    """The Gaussians of a guide at its sites, after it has run.

    :param guide: the guide.
    :param seeded: the guide with a key, to run it again.
    :param params: parameters of the fit.
    :param trace: trace of the guide.
    :param laplace: see :func:`flat_gaussians`.
    """

    def __init__(
        self,
        guide: Any,
        seeded: Callable[..., Any],
        params: Mapping[str, Any],
        trace: Trace,
        args: Any,
        kwargs: Any,
        laplace: bool,
    ) -> None:
        self.trace = trace
        self._flat = flat_gaussians(guide, params, trace, laplace)
        ours = {n for n, site in trace.items() if isinstance(site.get("infer", {}).get(MESSAGE), Belief)}
        others = {n: s for n, s in trace.items() if s["type"] == "sample" and n not in ours and not s["is_observed"]}
        others = {n: s for n, s in others.items() if gaussian_of(s["fn"], s["fn"].shape()) is not None}

        def run(values: dict[str, Any]) -> Trace:
            with handlers.block():
                return handlers.trace(handlers.substitute(seeded, {**params, **values})).get_trace(*args, **kwargs)

        both = ours | others.keys()
        self._read = read_by_others(run, {n: trace[n]["value"] for n in both}) if others and len(both) > 1 else set()

    def at(self, msg: dict[str, Any], inputs: bool) -> Belief | InputBelief | None:
        """The Gaussian of a site of the model; ``None`` if the guide has none, or a draw must replace it.

        :param inputs: whether to ask also for Gaussians of latent inputs that are hidden from fits.
        """
        name = msg["name"]
        own, site = self.trace[name], site_of(msg)
        belief = own["infer"].get(MESSAGE)
        if isinstance(belief, Belief):
            return belief._replace(asked=True)
        if isinstance(belief, InputBelief):
            return belief._replace(asked=inputs or belief.analytic)
        if site is not None:
            q = self._flat.get(name, self._gaussian(name, site.shape))
            return None if q is None else Belief(q, None, analytic=False, asked=True)
        if inputs and input_site_of(msg) is not None:
            q = self._gaussian(name, msg["fn"].shape())
            if isinstance(q, Diagonal):
                return InputBelief(q.loc, q.scale, analytic=False, asked=True)
        return None

    def _gaussian(self, name: str, shape: tuple[int, ...]) -> Whitened | None:
        # If other sites depend on its draw, all must use the draw.
        return None if name in self._read else gaussian_of(self.trace[name]["fn"], shape)


class Asking(Messenger):
    """A model that finds the answers in place of the guide's messages. Put it beneath ``replay``.

    :param answers: answers of the guide.
    :param inputs: see :meth:`Answers.at`.
    """

    def __init__(self, fn: Callable[..., Any], answers: Answers, inputs: bool) -> None:
        super().__init__(fn)
        self.answers, self.inputs, self.has_inputs = answers, inputs, False
        self.trace = dict(answers.trace)  # for `replay`, which copies `infer` from it

    def process_message(self, msg: dict[str, Any]) -> None:
        own = self.trace.get(msg.get("name", ""))
        if own is None or own["type"] != "sample" or msg["type"] != "sample" or msg["is_observed"]:
            return
        belief = self.answers.at(msg, self.inputs)
        if belief is not None:
            self.has_inputs |= isinstance(belief, InputBelief) and not belief.analytic
            self.trace[msg["name"]] = own | {"infer": own["infer"] | belief.as_infer()}
