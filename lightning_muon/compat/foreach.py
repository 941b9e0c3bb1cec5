"""Operations on lists of tensors, one launch for many, for which torch has private names only (2.11 to 2.14)."""

from __future__ import annotations

import torch

add_ = torch._foreach_add_
clamp_max_ = torch._foreach_clamp_max_
clamp_min_ = torch._foreach_clamp_min_
copy_ = torch._foreach_copy_
lerp = torch._foreach_lerp
lerp_ = torch._foreach_lerp_
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
sub = torch._foreach_sub
