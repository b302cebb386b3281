#ifndef RESIDENCY_SIMCUDA_OPERATORS_HOST_WORK_H
#define RESIDENCY_SIMCUDA_OPERATORS_HOST_WORK_H

namespace residency::simcuda {

/// From now on, operators that a program calls on CPU tensors cost the modelled host its time.
void price_host_operators();

}  // namespace residency::simcuda

#endif
