"""One self-contained HTML page about results and trainings: tables, curves, episodes, filters, certificates.

`write` is the whole of it. What a page shows is found by `read`, drawn by `curves`, `pictures` and `models`, and put
into the files of `templates/` by `page`. Nothing on the page is fetched from anywhere when it is viewed.
"""

from bilevel import extras

extras.require("jinja2", "plotly", extra="report", purpose="bilevel.report")
