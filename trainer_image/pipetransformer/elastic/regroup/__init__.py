"""A regroup as a transaction: plan, transfer, vote, commit."""
