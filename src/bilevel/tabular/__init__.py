"""Tables: from a CSV or Parquet file to a tuned scikit-learn pipeline. Names are imported when first used."""

import lazy_loader

from bilevel import extras

extras.require("sklearn", "pandas", extra="table", purpose="bilevel.tabular")

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "model": ["TableModel", "load"],
        "reading": ["read_table"],
        "settings": ["TuneSettings"],
        "study": ["tune"],
    },
)
