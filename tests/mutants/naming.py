"""Whether what `verify` says of a mutant names the place where it is wrong."""

from mutant import Mutant
from planting import ROOT, file_of
from trial import Outcome


def named_rightly(mutant: Mutant, outcome: Outcome, *, exactly: bool = False) -> bool:
    """The right layer or site; `exactly`: layer, site and direction. By the place that was written down before: the
    activation, or the weight, or that it is the update. What is refused while it is traced is named by a function in
    the mutant's own file."""
    place = mutant.place
    if outcome.way == "types":
        own = str(file_of(mutant).relative_to(ROOT))
        return any(where.startswith(own) for where in outcome.where)
    if place is None or outcome.way == "nothing":
        return False
    sites = (place.site, *place.or_else)
    if outcome.place is not None:
        layer, site, backward = outcome.place
        if exactly:
            return site in sites and (layer, backward) == (place.layer, place.backward)
        return site in sites or layer == place.layer
    if place.site == "weights":
        return "the update of the weights" in outcome.said or "figures" in outcome.said
    if place.site == "communication":
        return any("communication" in check for check in outcome.checks)
    if "loss" in sites and "losses" in outcome.said:
        return True
    return "a gradient of weights" in outcome.said and any(site in outcome.said for site in sites)
