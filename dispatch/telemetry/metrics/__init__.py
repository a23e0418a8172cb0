"""Metrics of a gateway process: what is counted here, what is read of the group, and how both go out."""
