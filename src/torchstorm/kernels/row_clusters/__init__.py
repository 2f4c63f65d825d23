"""Long rows on Hopper: the columns of a row lie spread over a cluster of blocks, which exchange what they found."""
