// SPDX-License-Identifier: Apache-2.0
// The norms in this tier's registers.
#include "vec.h"

#include "../norms_vec.inc"
