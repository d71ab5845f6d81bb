"""How fast kvmpi is, beside what else there is: ``kvmpi bench`` and the programs behind it."""
