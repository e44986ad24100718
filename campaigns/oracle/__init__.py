"""A second derivation of every bound, slow and independent of the kernel: tests and the campaign compare both."""

from campaigns.oracle.derive import derive as derive
