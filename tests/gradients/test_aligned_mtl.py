"""Aligned-MTL against the singular values it is defined by."""

import pytest
import torch

from mtrl_lightning.gradients.aligned_mtl import AlignedMTL
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of


def by_svd(gradients):
    """Return the mean row of ``s_min U V'``, whose singular values all equal the smallest."""
    left, size, right = torch.linalg.svd(gradients.double(), full_matrices=False)
    kept = size > 1e-2 * size.max()
    return (size[kept].min() * left[:, kept] @ right[kept]).mean(0)


@pytest.mark.parametrize(("num_tasks", "size"), [(2, 4), (8, 3), (10, 40)])
def test_update_is_the_mean_of_the_aligned_gradients(num_tasks, size):
    gradients = random_gradients(num_tasks, size, seed=num_tasks)
    assert_near(update(AlignedMTL(spec_of(num_tasks)), gradients), by_svd(gradients), atol=1e-5)


def test_conflicting_and_parallel_gradients_by_hand():
    # (1, 0) and (-0.6, 0.8): eigenvalues 1.6 for (1, -1) and 0.4 for (1, 1), so that B (1, 1)/2 =
    # (1, 1)/2
    assert_near(update(AlignedMTL(spec_of(2)), [[1.0, 0.0], [-0.6, 0.8]]), [0.2, 0.4])
    method = AlignedMTL(spec_of(3))
    assert_near(update(method, [[1.0, 1.0], [3.0, 3.0], [0.5, 0.5]]), [1.5, 1.5])
    found = {name: float(value) for name, value in method.metrics().items()}
    assert (found["conflicts"], found["cosine"]) == (0, pytest.approx(1))


def test_rounding_is_no_component():
    gradients = torch.ones(3, 5) + 1e-5 * random_gradients(3, 5)
    assert_near(update(AlignedMTL(spec_of(3)), gradients), torch.ones(5), atol=1e-4)
