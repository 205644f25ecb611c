"""Algorithm 1 with fewer kept iterates. The other iterates are computed again."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Reverse('sqrt')"
GROUP = "bilevel"

prepare = with_method(bl.Reverse("sqrt"))
