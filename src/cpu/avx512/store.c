// SPDX-License-Identifier: Apache-2.0
// The store in this tier's registers.
#include "vec.h"

#include "../store_vec.inc"
