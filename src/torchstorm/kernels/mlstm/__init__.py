"""The mLSTM."""
