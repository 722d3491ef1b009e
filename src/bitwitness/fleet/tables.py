"""The tables of a controller's database, apart from the code because other programs read them too."""

SCHEMA = 3
"""Counts up with every change of the tables; a file of another one is refused, or brought up to this one (`state.State`)."""

APPROVALS = """
-- What a person is asked, and what they said: one row a question, the newest of a proposal counts. An answer is given once.
CREATE TABLE approvals (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    proposal INTEGER NOT NULL,
    incident TEXT NOT NULL,
    node TEXT NOT NULL,
    act TEXT NOT NULL,
    -- Which machine the node was when it was asked; another one needs another answer.
    machine TEXT NOT NULL,
    -- Of all that was shown.
    digest TEXT NOT NULL,
    calls TEXT NOT NULL,
    asked TEXT NOT NULL,
    said TEXT,
    who TEXT NOT NULL DEFAULT '',
    why TEXT NOT NULL DEFAULT '',
    answered TEXT,
    -- Why it counts no more, e.g. because it was withdrawn.
    lapsed TEXT
);
CREATE UNIQUE INDEX approvals_open ON approvals (proposal) WHERE lapsed IS NULL;
CREATE INDEX approvals_node ON approvals (node);

-- Health checks that a person has started, noted before they are asked for.
CREATE TABLE health_checks (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    node TEXT NOT NULL,
    machine TEXT NOT NULL,
    begun TEXT NOT NULL,
    boot TEXT NOT NULL,
    ticks REAL NOT NULL,
    who TEXT NOT NULL,
    why TEXT NOT NULL,
    calls TEXT NOT NULL,
    outcome TEXT,
    text TEXT NOT NULL DEFAULT ''
);
CREATE INDEX health_checks_node ON health_checks (node);

-- What an incident was judged to be, as far as the controller has heard; who is '' where records of injected faults say so.
CREATE TABLE judgements (
    incident TEXT PRIMARY KEY,
    judgement TEXT NOT NULL,
    who TEXT NOT NULL,
    why TEXT NOT NULL,
    time TEXT NOT NULL
) WITHOUT ROWID;
"""
"""What came with schema 3."""

MIGRATIONS = {2: APPROVALS}
"""What brings a file of this schema to the next one; it is done in one transaction, with the new number."""

TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- What happened, one line each. Lines are added and never changed: the triggers refuse everything else.
CREATE TABLE audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    who TEXT NOT NULL,
    what TEXT NOT NULL,
    incident TEXT NOT NULL,
    node TEXT NOT NULL,
    text TEXT NOT NULL,
    record TEXT NOT NULL
);
CREATE INDEX audit_node ON audit (node);
CREATE INDEX audit_incident ON audit (incident);
CREATE TRIGGER audit_stays BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit trail is not changed'); END;
CREATE TRIGGER audit_keeps BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the audit trail is not changed'); END;

-- Incidents that were picked up, written together with what is proposed about them.
CREATE TABLE incidents (
    id TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    path TEXT NOT NULL,
    status TEXT NOT NULL,
    headline TEXT NOT NULL,
    job TEXT NOT NULL,
    time TEXT NOT NULL,
    seen TEXT NOT NULL,
    -- When the hardware is asked once more what it has said since; NULL: no more.
    later TEXT
) WITHOUT ROWID;
CREATE INDEX incidents_later ON incidents (later) WHERE later IS NOT NULL;

-- Who was named when: what strikes are counted from. Hand-cleared ones count no more.
CREATE TABLE namings (
    incident TEXT NOT NULL,
    device TEXT NOT NULL,
    node TEXT NOT NULL,
    record TEXT NOT NULL,
    cleared TEXT,
    PRIMARY KEY (incident, record)
) WITHOUT ROWID;

-- What should be done, and what became of it.
CREATE TABLE proposals (
    key INTEGER PRIMARY KEY,
    incident TEXT NOT NULL,
    number INTEGER NOT NULL,
    node TEXT NOT NULL,
    act TEXT,
    made TEXT NOT NULL,
    boot TEXT NOT NULL,
    ticks REAL NOT NULL,
    record TEXT NOT NULL,
    status TEXT NOT NULL,
    hold TEXT NOT NULL DEFAULT '',
    why TEXT NOT NULL DEFAULT '',
    attempts INTEGER NOT NULL DEFAULT 0,
    due TEXT,
    final INTEGER NOT NULL DEFAULT 0,
    updated TEXT NOT NULL,
    UNIQUE (incident, number)
);
CREATE INDEX proposals_status ON proposals (status);
CREATE INDEX proposals_node ON proposals (node);

-- Written before anything is done. Without an outcome: it may or may not have happened, and the node is looked at.
CREATE TABLE intents (
    key INTEGER PRIMARY KEY,
    proposal INTEGER NOT NULL,
    node TEXT NOT NULL,
    act TEXT NOT NULL,
    before TEXT NOT NULL,
    calls TEXT NOT NULL,
    tried TEXT NOT NULL,
    boot TEXT NOT NULL,
    ticks REAL NOT NULL,
    process TEXT NOT NULL,
    started INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,
    text TEXT NOT NULL DEFAULT ''
);
CREATE INDEX intents_open ON intents (key) WHERE outcome IS NULL;
CREATE INDEX intents_tried ON intents (tried);

-- Jobs that may have to be started again without the nodes of their incidents; one that waits a job.
CREATE TABLE requeues (
    incident TEXT PRIMARY KEY,
    job TEXT NOT NULL,
    nodes TEXT NOT NULL,
    restarts INTEGER,
    status TEXT NOT NULL,
    why TEXT NOT NULL DEFAULT '',
    due TEXT,
    made TEXT NOT NULL,
    started INTEGER NOT NULL DEFAULT 0,
    -- When it was started again, or given up: what was found before that needs no row of its own.
    ended TEXT
) WITHOUT ROWID;
CREATE INDEX requeues_job ON requeues (job);

-- When a person returned a node (device '') or a device to service last: what was found before is answered.
CREATE TABLE clears (
    node TEXT NOT NULL,
    device TEXT NOT NULL,
    time TEXT NOT NULL,
    who TEXT NOT NULL,
    PRIMARY KEY (node, device)
) WITHOUT ROWID;

-- Devices that were taken out, and those of them that came back.
CREATE TABLE condemned (
    device TEXT NOT NULL,
    serial TEXT NOT NULL,
    node TEXT NOT NULL,
    incident TEXT NOT NULL,
    time TEXT NOT NULL,
    PRIMARY KEY (device, incident)
) WITHOUT ROWID;
CREATE TABLE serials (device TEXT PRIMARY KEY, serial TEXT NOT NULL) WITHOUT ROWID;
-- Slices of a device, which are the same silicon.
CREATE TABLE aliases (alias TEXT PRIMARY KEY, device TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE returns (
    device TEXT NOT NULL,
    incident TEXT NOT NULL,
    node TEXT NOT NULL,
    since TEXT NOT NULL,
    time TEXT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (device, incident, node, since)
) WITHOUT ROWID;

-- What is said once, and is said again only after it was over.
CREATE TABLE said (key TEXT PRIMARY KEY, text TEXT NOT NULL, time TEXT NOT NULL) WITHOUT ROWID;

-- Messages, written together with what they tell, and to whom they were delivered.
CREATE TABLE outbox (
    id TEXT PRIMARY KEY,
    time TEXT NOT NULL,
    severity TEXT NOT NULL,
    subject TEXT NOT NULL,
    text TEXT NOT NULL,
    record TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE deliveries (
    message TEXT NOT NULL,
    notifier TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due TEXT NOT NULL,
    delivered TEXT,
    error TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (message, notifier)
) WITHOUT ROWID;
CREATE INDEX deliveries_open ON deliveries (due) WHERE delivered IS NULL;
"""
TABLES += APPROVALS
