"""A table with a column of dates: daily visitors, and how many will come in the next three months.

    python examples/dates.py [--out out] [--seed 0] [--quick]

Visitors of a made museum over three years, one week in ten missing, with a trend, a season and days of the week. ``ogp.counts`` is
called as it stands, but for M, so that it does not look at the clock. Two other forecasts stand beside it: what the same day of the
week had a year before, and the mean for each day of the week and month.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import numpyro_orthgp as ogp

DAYS, AHEAD = 3 * 365, 91


def visitors(seed: int) -> pd.DataFrame:
    """Dates and counts; missing where the museum was closed."""
    rng = np.random.default_rng(seed)
    date = pd.date_range("2021-01-01", periods=DAYS + AHEAD)
    year = (date - date[0]).days.to_numpy() / 365.25
    of_weekday = np.array([-0.5, -0.3, -0.2, -0.2, 0.1, 0.5, 0.6])  # from Monday
    log_rate = 5 + 0.15 * year + 0.4 * np.cos(2 * np.pi * (year - 0.55)) + of_weekday[date.day_of_week]
    counts = rng.negative_binomial(20, 1 / (1 + np.exp(log_rate) / 20)).astype(float)
    counts[rng.uniform(size=len(date) // 7 + 1)[np.arange(len(date)) // 7] < 0.1] = np.nan
    return pd.DataFrame({"date": date, "visitors": counts})


def year_before(known: pd.DataFrame, new: pd.DataFrame) -> np.ndarray:
    """52 weeks before; a year further back where the museum was closed."""
    old = known.set_index("date")["visitors"]
    back = [old.reindex(new["date"] - pd.Timedelta(weeks=52 * i)).to_numpy() for i in (1, 2, 3)]
    return np.where(np.isfinite(back[0]), back[0], np.where(np.isfinite(back[1]), back[1], back[2]))


def by_day_and_month(known: pd.DataFrame, new: pd.DataFrame) -> np.ndarray:
    keys = [lambda table: table["date"].dt.day_of_week, lambda table: table["date"].dt.month]
    means = known.groupby([key(known).to_numpy() for key in keys])["visitors"].mean()
    return means.reindex(list(zip(*(key(new) for key in keys), strict=True))).to_numpy()


def save_figure(path: Path, table: pd.DataFrame, predicted: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10.5, 4.2), layout="constrained")
    shown = table.iloc[DAYS - AHEAD :]
    ahead = table["date"].to_numpy()[DAYS:]
    for level, shade in ((0.95, 0.18), (0.5, 0.35)):
        lower, upper = predicted.interval(level)
        label = f"{100 * level:.0f} % interval"
        axis.fill_between(ahead, lower, upper, color="#0072B2", alpha=shade, lw=0, step="mid", label=label)
    axis.plot(ahead, predicted.mean, color="#0072B2", lw=1.5, drawstyle="steps-mid", label="mean")
    before = shown["date"].to_numpy() < ahead[0]
    axis.plot(shown["date"][before], shown["visitors"][before], "o", ms=3.5, color="0.25", label="days of the fit")
    axis.plot(shown["date"][~before], shown["visitors"][~before], "o", ms=3.5, color="#D55E00", label="days after it")
    axis.axvline(ahead[0], color="0.6", lw=1)
    axis.set(ylabel="visitors a day", ylim=(0, 1.2 * np.nanmax(shown["visitors"])))
    axis.legend(frameon=False, fontsize=8, ncols=5, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few points and steps, to see that it runs")
    args = parser.parse_args(argv)
    table = visitors(args.seed)
    known, new = table.iloc[:DAYS], table.iloc[DAYS:]

    budget = {"M": 20, "num_steps": 50} if args.quick else {"M": 100}
    fit = ogp.counts(known[["date"]], known["visitors"], **budget)
    print(f"{fit}\n")
    predicted = fit.predict(new[["date"]])
    y = new["visitors"].to_numpy()
    open_days = np.isfinite(y)
    forecasts = {
        "one call": predicted.mean,
        "52 weeks before": year_before(known, new),
        "by day and month": by_day_and_month(known, new),
        "mean": np.full(AHEAD, known["visitors"].mean()),
    }
    print(f"{'':18s}{'RMSE':>8s}{'mean error':>12s}")
    for name, mean in forecasts.items():
        error = (mean - y)[open_days]
        print(f"{name:18s}{np.sqrt(np.mean(error**2)):8.1f}{error.mean():12.1f}")
    for level in (0.5, 0.95):
        lower, upper = predicted.interval(level)
        inside = ((lower <= y) & (y <= upper))[open_days].mean()
        print(f"{100 * inside:.0f} % of the days ahead are within their {100 * level:.0f} % intervals")
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "dates.png", table, predicted)


if __name__ == "__main__":
    main()
