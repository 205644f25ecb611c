"""Algorithm 1 from √T iterates, the others recomputed."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Reverse('sqrt')"
GROUP = "bilevel"

prepare = with_method(bl.Reverse("sqrt"))
