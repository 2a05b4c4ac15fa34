"""What the papers printed, and nothing else.

Rows of a table are data sets, columns a method and its inducing points. In parentheses: standard errors over splits, except in Shi
et al., who print standard deviations. They do not say so, but Titsias 2025 (Tables 2 and 4) quotes their numbers divided by
sqrt(5), for the five splits: 0.1499 for ODVGP on keggdirected is 0.067 there. Here that is done on reading.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FIVE_SPLITS = 1 / math.sqrt(5)


class Value(NamedTuple):
    """
    :param mean: over splits.
    :param error: its standard error, ``None`` where there is none.
    :param digits: after the point that are shown, in a paper those that it prints.
    """

    mean: float
    error: float | None = None
    digits: int = 4


class Table(NamedTuple):
    """
    :param title: what the table is.
    :param quantity: "log_density" or "rmse", of test outputs in units where they have standard deviation 1.
    :param setting: the name of an experiment in ``settings``.
    :param values: by data set, then by method and points, such as "SVGP 1024".
    """

    title: str
    quantity: str
    setting: str
    values: dict[str, dict[str, Value]]

    @property
    def columns(self) -> list[str]:
        """Methods and points."""
        return list(next(iter(self.values.values())))


def read(text: str, spread: float = 1.0) -> dict[str, dict[str, Value]]:
    """A table as it is typed below; ``spread`` makes standard errors of the numbers in parentheses."""
    head, *lines = text.strip().splitlines()
    columns = [name.replace(":", " ") for name in head.split()[1:]]
    table = {}
    for line in lines:
        name, *cells = line.split()
        table[name] = dict(zip(columns, (_value(cell, spread) for cell in cells), strict=True))
    return table


def _value(cell: str, spread: float) -> Value:
    mean, _, error = cell.rstrip(")").partition("(")
    digits = len(mean.partition(".")[2])
    return Value(float(mean), float(error) * spread if error else None, digits)


# Shi, Titsias, Mnih 2020 (workshop version with appendices), App. I.1, Table 3.
SHI_3 = """
set             SVGP:1024        SVGP:1536        ODVGP:1024+1024  ODVGP:1024+8096  SOLVE-GP:1024+1024 SVGP:2048
kin40k           0.0938(0.0056)   0.1287(0.0067)   0.1372(0.0061)   0.1444(0.0040)   0.1868(0.0050)   0.1374(0.0057)
protein         -0.9628(0.0124)  -0.9490(0.0116)  -0.9558(0.0116)  -0.9460(0.0108)  -0.9429(0.0110)  -0.9402(0.0112)
keggdirected     0.9673(0.0111)   0.9442(0.0133)  -0.1988(0.1499)  -0.1364(0.1416)   0.9730(0.0073)   0.9071(0.0071)
keggundirected   0.6784(0.0085)   0.6734(0.0100)   0.1054(0.0739)   0.1091(0.0747)   0.6804(0.0074)   0.6648(0.0099)
3droad          -0.6981(0.0051)  -0.6744(0.0056)  -0.6644(0.0062)  -0.6568(0.0067)  -0.6587(0.0034)  -0.6689(0.0049)
song            -1.1934(0.0019)  -1.1927(0.0018)  -1.1932(0.0016)  -1.1929(0.0016)  -1.1918(0.0019)  -1.1924(0.0018)
buzz            -0.0793(0.0040)  -0.0786(0.0041)  -0.0783(0.0026)  -0.0789(0.0029)  -0.0711(0.0033)  -0.0788(0.0039)
houseelectric    1.3036(0.0044)   1.3040(0.0069)   1.3170(0.0052)   1.3188(0.0086)   1.3332(0.0058)   1.3036(0.0056)
"""

# Shi, Titsias, Mnih 2020, App. I.1, Table 4.
SHI_4 = """
set             SVGP:1024       SVGP:1536       ODVGP:1024+1024 ODVGP:1024+8096 SOLVE-GP:1024+1024 SVGP:2048
kin40k          0.1933(0.0021)  0.1824(0.0028)  0.1827(0.0025)  0.1798(0.0014)  0.1721(0.0019)  0.1771(0.0026)
protein         0.6298(0.0092)  0.6208(0.0086)  0.6247(0.0087)  0.6176(0.0082)  0.6175(0.0083)  0.6151(0.0084)
keggdirected    0.0975(0.0059)  0.0981(0.0054)  0.1764(0.0268)  0.1573(0.0194)  0.0951(0.0046)  0.0995(0.0060)
keggundirected  0.1233(0.0021)  0.1232(0.0018)  0.1561(0.0089)  0.1567(0.0091)  0.1229(0.0016)  0.1236(0.0016)
3droad          0.4825(0.0027)  0.4703(0.0032)  0.4665(0.0031)  0.4620(0.0037)  0.4639(0.0012)  0.4668(0.0030)
song            0.7973(0.0018)  0.7967(0.0017)  0.7975(0.0016)  0.7973(0.0016)  0.7964(0.0018)  0.7964(0.0018)
buzz            0.2628(0.0013)  0.2627(0.0012)  0.2627(0.0014)  0.2629(0.0017)  0.2608(0.0017)  0.2626(0.0011)
houseelectric   0.0634(0.0003)  0.0633(0.0003)  0.0624(0.0004)  0.0624(0.0006)  0.0615(0.0003)  0.0634(0.0003)
"""

# Shi, Titsias, Mnih 2020, App. I.1, Table 5.
SHI_5 = """
set        SVGP:1024        SVGP:1536        ODVGP:1024+1024  ODVGP:1024+8096  SOLVE-GP:1024+1024 SVGP:2048
elevators  -0.5164(0.0144)  -0.5108(0.0149)  -0.5184(0.0145)  -0.5231(0.0137)  -0.5090(0.0150)  -0.5075(0.0152)
bike       -0.2176(0.0123)  -0.2030(0.0140)  -0.1906(0.0140)  -0.1860(0.0128)  -0.1891(0.0130)  -0.1933(0.0138)
"""

# Shi, Titsias, Mnih 2020, App. I.1, Table 6.
SHI_6 = """
set        SVGP:1024       SVGP:1536       ODVGP:1024+1024 ODVGP:1024+8096 SOLVE-GP:1024+1024 SVGP:2048
elevators  0.3975(0.0092)  0.3959(0.0092)  0.3974(0.0093)  0.3992(0.0091)  0.3950(0.0094)  0.3949(0.0093)
bike       0.2831(0.0058)  0.2789(0.0065)  0.2724(0.0064)  0.2703(0.0063)  0.2724(0.0060)  0.2756(0.0063)
"""

# Titsias 2025, Sec. 5.3, Table 2, without the lines that it quotes from Shi et al. 2020.
TITSIAS_2 = """
set             SVGP:1024      SVGP:2048      SVGP-new:1024  SVGP-new:2048
kin40k           0.108(0.002)   0.237(0.002)   0.152(0.003)   0.286(0.002)
protein         -0.969(0.006)  -0.944(0.006)  -0.965(0.006)  -0.938(0.006)
keggdirected     1.042(0.009)   1.050(0.009)   1.044(0.009)   1.051(0.009)
keggundirected   0.699(0.005)   0.703(0.005)   0.699(0.005)   0.703(0.005)
3droad          -0.704(0.003)  -0.650(0.003)  -0.701(0.003)  -0.651(0.004)
song            -1.192(0.001)  -1.190(0.001)  -1.192(0.001)  -1.190(0.001)
buzz            -0.069(0.002)  -0.063(0.001)  -0.065(0.002)  -0.060(0.001)
houseelectric    1.383(0.002)   1.419(0.002)   1.387(0.003)   1.421(0.002)
"""

# Titsias 2025, App. D.2, Table 4, without the lines that it quotes from Shi et al. 2020.
TITSIAS_4 = """
set             SVGP:1024     SVGP:2048     SVGP-new:1024 SVGP-new:2048
kin40k          0.195(0.001)  0.171(0.000)  0.182(0.001)  0.158(0.000)
protein         0.635(0.004)  0.619(0.004)  0.631(0.004)  0.615(0.004)
keggdirected    0.086(0.001)  0.086(0.001)  0.086(0.001)  0.086(0.001)
keggundirected  0.122(0.001)  0.121(0.001)  0.122(0.001)  0.121(0.001)
3droad          0.486(0.002)  0.460(0.002)  0.484(0.001)  0.461(0.002)
song            0.797(0.001)  0.795(0.001)  0.796(0.001)  0.795(0.001)
buzz            0.261(0.001)  0.260(0.001)  0.259(0.001)  0.258(0.000)
houseelectric   0.059(0.000)  0.057(0.000)  0.058(0.000)  0.057(0.000)
"""

# Titsias 2025, Sec. 5.2, Table 1. Zero points: the exact GP.
TITSIAS_1 = """
set        exact-GP:0     SGPR:1024      SGPR-artemev:1024 SGPR-new:1024  SGPR:2048      SGPR-artemev:2048 SGPR-new:2048
pol         1.089(0.011)   0.821(0.008)   0.859(0.007)      0.920(0.006)   0.958(0.008)   0.976(0.008)      0.998(0.008)
bike        3.105(0.022)   2.176(0.020)   2.199(0.024)      2.326(0.026)   2.337(0.030)   2.356(0.029)      2.511(0.021)
elevators  -0.386(0.001)  -0.387(0.001)  -0.387(0.001)     -0.387(0.001)  -0.387(0.001)  -0.387(0.001)     -0.387(0.001)
"""

# Salimbeni, Cheng, Boots, Deisenroth 2018, App. G, Table 3; the columns with daggers have 300 points, COUPLED without 400.
SALIMBENI_3 = """
set            COUPLED:300 COUPLEDNAT:300 COUPLED:400 COUPLEDNAT:400 ORTHNAT:300+700 ORTH:300+700 HYBRID:300+700 DECOUPLED:300+700
3droad         -0.7630     -0.7632        -0.7218     -0.7228        -0.5947         -0.6103      -0.7617        -0.9438
houseelectric   1.3130      1.3563         1.3383      1.3727         1.3899          1.3719       1.3092         0.6032
slice           0.7816      0.7868         0.8321      0.8415         0.8776          0.8701       0.7852         0.0655
elevators      -0.4475     -0.4455        -0.4448     -0.4438        -0.4479         -0.4441      -0.4585        -0.4966
bike            0.0059      0.0135         0.0321      0.0419         0.0271          0.0317      -0.0318        -0.1783
keggdirected    1.0134      1.0158         1.0214      1.0223         1.0224          1.0216       1.0102         0.8947
pol             0.0726      0.0821         0.1047      0.1132         0.1586          0.1451       0.0784        -0.2502
keggundirected  0.6984      0.6999         0.6994      0.7020         0.7007          0.6967       0.6878         0.6374
protein        -0.9531     -0.9535        -0.9375     -0.9361        -0.9138         -0.9165      -0.9527        -1.0464
song           -1.1902     -1.1898        -1.1890     -1.1884        -1.1880         -1.1882      -1.1909        -1.2266
buzz           -0.0566     -0.0551        -0.0512     -0.0490        -0.0480         -0.0484      -0.0614        -0.2285
kin40k          0.0561      0.1580         0.2191      0.2234         0.1931          0.1777       0.1531        -0.3877
"""

# Salimbeni, Cheng, Boots, Deisenroth 2018, App. G, Table 4. The columns HYBRID and DECOUPLED are as printed there, although their
# order of merit is the reverse of the one in Table 3 on every set.
SALIMBENI_4 = """
set            COUPLED:300 COUPLEDNAT:300 COUPLED:400 COUPLEDNAT:400 ORTHNAT:300+700 ORTH:300+700 HYBRID:300+700 DECOUPLED:300+700
3droad          0.5166      0.5163         0.4946      0.4951         0.4332          0.4395       0.6179         0.5150
houseelectric   0.0639      0.0611         0.0615      0.0595         0.0583          0.0594       0.1286         0.0636
slice           0.0840      0.0848         0.0787      0.0779         0.0730          0.0736       0.2112         0.0838
elevators       0.3767      0.3760         0.3756      0.3753         0.3770          0.3752       0.3973         0.3812
bike            0.2342      0.2324         0.2283      0.2261         0.2293          0.2282       0.2848         0.2438
keggdirected    0.0883      0.0878         0.0874      0.0871         0.0871          0.0873       0.0980         0.0883
pol             0.2073      0.2059         0.2012      0.2000         0.1906          0.1931       0.2867         0.2065
keggundirected  0.1200      0.1196         0.1197      0.1191         0.1194          0.1202       0.1304         0.1223
protein         0.6207      0.6216         0.6118      0.6113         0.5963          0.5972       0.6868         0.6209
song            0.7954      0.7952         0.7944      0.7939         0.7936          0.7938       0.8275         0.7960
buzz            0.2601      0.2606         0.2586      0.2579         0.2574          0.2576       0.3106         0.2617
kin40k          0.2087      0.1885         0.1768      0.1746         0.1740          0.1776       0.3501         0.1887
"""

SHI, TITSIAS = "Shi, Titsias, Mnih 2020", "Titsias 2025"
SALIMBENI = "Salimbeni, Cheng, Boots, Deisenroth 2018"
TABLES = {
    "shi2020:3": Table(f"{SHI}, Table 3", "log_density", "large", read(SHI_3, FIVE_SPLITS)),
    "shi2020:4": Table(f"{SHI}, Table 4", "rmse", "large", read(SHI_4, FIVE_SPLITS)),
    "shi2020:5": Table(f"{SHI}, Table 5", "log_density", "large", read(SHI_5, FIVE_SPLITS)),
    "shi2020:6": Table(f"{SHI}, Table 6", "rmse", "large", read(SHI_6, FIVE_SPLITS)),
    "titsias2025:1": Table(f"{TITSIAS}, Table 1", "log_density", "collapsed", read(TITSIAS_1)),
    "titsias2025:2": Table(f"{TITSIAS}, Table 2", "log_density", "large", read(TITSIAS_2)),
    "titsias2025:4": Table(f"{TITSIAS}, Table 4", "rmse", "large", read(TITSIAS_4)),
    "salimbeni2018:3": Table(f"{SALIMBENI}, Table 3", "log_density", "bases", read(SALIMBENI_3)),
    "salimbeni2018:4": Table(f"{SALIMBENI}, Table 4", "rmse", "bases", read(SALIMBENI_4)),
}
