"""One self-contained HTML page about results and trainings: tables, curves, episodes, filters, certificates.

`page.write` is the entry point. `read` finds results and runs; `curves` and `models` prepare what is shown;
`page` fills the files of `templates/`. The page loads nothing over the network when it is viewed.
"""

from bilevel import extras

extras.require("jinja2", "plotly", extra="report", purpose="bilevel.report")
