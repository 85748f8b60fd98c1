"""IO processors, and scores of pairs of texts: what stands between users and a model that pools."""
