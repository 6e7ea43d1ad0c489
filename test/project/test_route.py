"""The route of a step through the package stays short: calls, files, and how often a reader changes file.

``benchmarks/route.py`` prints it, and the same of FSDP2.
"""

import route
from on_ranks import ranks

LIMITS: dict[str, tuple[int, int, int]] = {
    "construct": (1700, 74, 510),
    "forward": (345, 24, 212),
    "forward, a unit": (94, 22, 57),
    "backward": (690, 25, 335),
    "backward, a unit": (220, 23, 105),
    "optimizer": (27, 5, 5),
    "state_dict": (790, 13, 310),
}
"""Most calls, files and changes of file of a phase, over the supported versions of torch. These numbers only go down.

Construction and ``state_dict`` have some room: earlier tests in the process and the depth of the caller's stack change them.
"""


@ranks(2)
def test_the_route_of_a_step(ctx):
    found = route.measure(ctx.group)
    too_long = {name: figures for name, figures in found.items() if any(map(int.__gt__, figures, LIMITS[name]))}
    assert found.keys() == LIMITS.keys()
    assert not too_long, f"{too_long}; limits: {LIMITS}"
