"""A suspect device beside healthy ones, on the same work: how it is wrong, for the vendor, for the next detector, for science.

The method is that of Ma, Pei, Lausen and Karypis, "Understanding Silent Data Corruption in LLM Training" (ACL 2025, arXiv
2502.12340), which published no code. Participants run one workload; the leader, a healthy device, keeps a tape of all that it
computes, and everybody else is compared with the tape, on the host: nobody judges itself. What differs goes into journals, one a
participant and mode, and one pure judge reads them.
"""
