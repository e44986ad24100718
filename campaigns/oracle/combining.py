"""Bounds of groups that are put together from groups of bases: the arithmetic behind `Value.gather`, on arrays.

For a group y made of groups x_g of bases, `y = sum_g A_g x_g`: `|y|^2 <= sum_g |A_g|^2 |x_g|^2` where no entry of y
mixes two groups, and `|y| <= sum_g |A_g| |x_g|` where entries do. And `|y|` is at most the sum, over bases, of these
bounds of what comes from each.
"""

from typing import NamedTuple

import numpy as np

from campaigns.oracle.upper import ZERO, Upper, root_up

UNIT = 2.0**-53
"""Half a unit in the last place of float64, relatively."""


class Part(NamedTuple):
    """One term on the groups that are left after like slices were taken together: arrays `(groups, entries)`."""

    number: int
    """The number of the base."""
    column: np.ndarray
    group: np.ndarray
    label: np.ndarray
    factor: np.ndarray
    roundings: int

    def of_group(self, row: int) -> "Part":
        """The term on one of these groups."""
        return self._replace(
            column=self.column[row], group=self.group[row], label=self.label[row], factor=self.factor[row]
        )


def slack(roundings: int) -> float:
    """More than so many rounding errors, and those of this product."""
    return 1 + 2 * (roundings + 2) * UNIT if roundings else 1.0


def alike(parts: list[list[np.ndarray]], number: list[int], axis: int) -> bool:
    """Whether all slices along an axis are the first one moved to other groups with the same bounds."""
    shifts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for base, (column, group, label, factor) in zip(number, parts, strict=True):
        present = column >= 0
        first = present.take([0], axis)
        if not ((present == first).all() and (factor == factor.take([0], axis)).all()):
            return False
        if not (np.where(present, label, 0) == np.where(first, label.take([0], axis), 0)).all():
            return False
        if not present.any():
            continue
        where = np.unravel_index(int(np.argmax(first)), first.shape)
        found = []
        for array in (column, group):
            moved = array - array.take([0], axis)
            line = moved[tuple(slice(None) if i == axis else int(w) for i, w in enumerate(where))]
            expected = np.expand_dims(line, [i for i in range(array.ndim) if i != axis])
            if not (np.where(present, moved, expected) == expected).all():
                return False
            found.append(line)
        if base in shifts and not all((a == b).all() for a, b in zip(shifts[base], found, strict=True)):
            return False
        shifts[base] = (found[0], found[1])
    return True


def one_group(parts: list[Part], tables: list[list[dict[int, Upper]]]) -> tuple[Upper, Upper, Upper]:
    """Radius, gain and largest entry of one group made of the given entries of bases."""
    atoms: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        present = part.column >= 0
        for group in np.unique(part.group[present]):
            atoms.setdefault((part.number, int(group)), []).append(part)
    sizes: dict[tuple[int, int], list[Upper]] = {}
    for (number, group), own in atoms.items():
        size, entry, label = _norm(own, group)
        sizes[number, group] = [factor * tables[number][i][label] for i, factor in enumerate((size, size, entry))]
    radius, gain, largest = _of_clusters(sizes, _clusters(list(atoms), parts))
    alone = []  # what comes from one base, of which other bases do not join the groups
    for number in {part.number for part in parts}:
        own = {atom: bounds for atom, bounds in sizes.items() if atom[0] == number}
        alone.append(_of_clusters(own, _clusters(list(own), [part for part in parts if part.number == number])))
    radius, gain = min(radius, sum((a[0] for a in alone), ZERO)), min(gain, sum((a[1] for a in alone), ZERO))
    largest = min(largest, sum((a[2] for a in alone), ZERO))
    return radius, gain, min(largest, radius)


def _of_clusters(
    sizes: dict[tuple[int, int], list[Upper]], cluster: dict[tuple[int, int], int]
) -> tuple[Upper, Upper, Upper]:
    """Radius, gain and largest entry of the sum of all atoms, from those of each."""
    radius = gain = largest = ZERO
    sums: dict[int, list[Upper]] = {}
    for atom, bounds in sizes.items():
        total = sums.setdefault(cluster[atom], [ZERO, ZERO, ZERO])
        for i, bound in enumerate(bounds):
            total[i] += bound
    if len(sums) == 1:
        ((radius, gain, largest),) = sums.values()
        return radius, gain, largest
    for total in sums.values():
        radius, gain = radius + total[0] * total[0], gain + total[1] * total[1]
        largest = max(largest, total[2])
    return root_up(radius), root_up(gain), largest


def _clusters(atoms: list[tuple[int, int]], parts: list[Part]) -> dict[tuple[int, int], int]:
    """Atom -> number of its cluster: atoms that meet in an entry are in one."""
    cluster = {atom: i for i, atom in enumerate(atoms)}
    if len(parts) == 1 or len(atoms) == 1:
        return cluster
    keys = np.stack([np.where(part.column >= 0, part.group, -1) for part in parts])
    for meeting in np.unique(keys, axis=1).T:
        joined = [(p.number, int(g)) for p, g in zip(parts, meeting, strict=True) if g >= 0]
        for other in joined[1:]:
            old, new = cluster[other], cluster[joined[0]]
            if old != new:
                cluster = {atom: new if c == old else c for atom, c in cluster.items()}
    return cluster


def _norm(parts: list[Part], group: int) -> tuple[Upper, Upper, int]:
    """Norm of the matrix from a base's group to a group of entries, the largest factor, and the group's label."""
    masks = [(part.column >= 0) & (part.group == group) for part in parts]
    label = int(next(part.label[mask][0] for part, mask in zip(parts, masks, strict=True) if mask.any()))
    chosen = [(part.column[mask], part.factor[mask]) for part, mask in zip(parts, masks, strict=True)]
    margin = Upper(slack(max(part.roundings for part in parts)))
    largest = sum((Upper(float(np.abs(factor).max(initial=0.0))) for _, factor in chosen), ZERO)
    column = chosen[0][0]
    if len(parts) == 1 and len(np.unique(column)) == len(column):  # entries of the base, each times a number
        return largest * margin, largest * margin, label
    return _gram_norm(masks, parts) * margin, largest * margin, label


def _gram_norm(masks: list[np.ndarray], parts: list[Part]) -> Upper:
    """Norm of the matrix A of terms that meet: the norm of `A^T A` is below its largest row sum of absolute values."""
    scale = max(float(np.abs(part.factor[mask]).max(initial=0.0)) for part, mask in zip(parts, masks, strict=True))
    pairs: list[np.ndarray] = []
    products: list[np.ndarray] = []
    for a, mask_a in zip(parts, masks, strict=True):
        for b, mask_b in zip(parts, masks, strict=True):
            both = mask_a & mask_b
            pairs.append(np.stack([a.column[both], b.column[both]], 1))
            products.append(a.factor[both] / scale * (b.factor[both] / scale))
    entries, entry = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
    product = np.concatenate(products)
    gram = np.abs(np.bincount(entry.reshape(-1), product, len(entries)))
    row = np.unique(entries[:, 0], return_inverse=True)[1].reshape(-1)
    # relative to the sums of absolute values: three errors of a product, and one for each addend of the two sums
    roundings = (3 + len(product) + 2 * max(part.roundings for part in parts)) * 2 * UNIT
    error = np.bincount(row, np.bincount(entry.reshape(-1), np.abs(product), len(entries))) * roundings
    return root_up(Upper(float((np.bincount(row, gram) + error).max() * (1 + 4 * UNIT)))) * Upper(scale)
