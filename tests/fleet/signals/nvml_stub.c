/* A libnvidia-ml whose answers are lines of the file $NVML_STUB: "KEY VALUE", a value "!N" is the return code N.
   Keys are "init", "count" and, of device 0, "0.uuid", "0.ecc.1.0" (kind, counter), "0.link.2.3" (link, counter), ...
   A key that is not there is not supported (3). What -DWITHOUT_X leaves out, an older driver does not have. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *device;
typedef struct {
    char legacy[16];
    unsigned domain, bus, dev, id, subsystem;
    char bus_id[32];
} pci_info;
typedef struct {
    uint32_t field, scope;
    int64_t stamp, latency;
    uint32_t type, ret;
    union {
        double d;
        unsigned u;
        unsigned long long ull;
    } value;
} field_value;
typedef struct {
    unsigned version;
    unsigned long long counts[11];
    unsigned exceeded;
} sram_status;

enum { SLICE = 1000, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

static char found[256];

static int look(const char *key) {
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    char line[512], name[256];
    int ret = NOT_SUPPORTED;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%255s %255[^\n]", name, found) == 2 && !strcmp(name, key)) {
            ret = found[0] == '!' ? atoi(found + 1) : 0;
            if (!strcmp(found, "hang")) sleep(600);
            if (!strcmp(found, "crash")) raise(SIGSEGV);
            break;
        }
    if (file) fclose(file);
    return ret;
}

static int of(device which, const char *what) {
    char key[64];
    snprintf(key, sizeof key, "%ld.%s", (long)which - 1, what);
    return look(key);
}

static int text(int ret, char *out, unsigned size) {
    if (ret) return ret;
    if (strlen(found) >= size) return TOO_SMALL;
    strcpy(out, found);
    return 0;
}

static int count(int ret, unsigned *out) {
    if (!ret) *out = strtoul(found, 0, 0);
    return ret;
}

static int large(int ret, unsigned long long *out) {
    if (!ret) *out = strtoull(found, 0, 0);
    return ret;
}

static int two(device which, const char *what, unsigned *a, unsigned *b) {
    int ret = of(which, what);
    return ret ? ret : sscanf(found, "%u %u", a, b) == 2 ? 0 : 999;
}

int nvmlInitWithFlags(unsigned flags) { return look("init") == NOT_SUPPORTED ? 0 : look("init"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int ret) { return ret == 9 ? "Driver Not Loaded" : ret == 15 ? "GPU is lost" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *out) { return count(look("count"), out); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) {
    *out = (device)(long)(index + 1);
    int ret = of(*out, "handle");
    return ret == NOT_SUPPORTED ? 0 : ret;
}

int nvmlDeviceGetUUID(device which, char *out, unsigned size) { return text(of(which, "uuid"), out, size); }
int nvmlDeviceGetSerial(device which, char *out, unsigned size) { return text(of(which, "serial"), out, size); }
int nvmlDeviceGetTemperature(device which, unsigned sensor, unsigned *out) { return count(of(which, "temperature"), out); }
int nvmlDeviceGetPowerUsage(device which, unsigned *out) { return count(of(which, "power"), out); }

int nvmlDeviceGetPciInfo_v3(device which, pci_info *out) {
    memset(out, 0, sizeof *out);
    return text(of(which, "pci"), out->bus_id, sizeof out->bus_id);
}

int nvmlDeviceGetEccMode(device which, unsigned *now, unsigned *pending) { return two(which, "eccmode", now, pending); }

int nvmlDeviceGetTotalEccErrors(device which, unsigned kind, unsigned counter, unsigned long long *out) {
    char key[32];
    snprintf(key, sizeof key, "ecc.%u.%u", kind, counter);
    return large(of(which, key), out);
}

#ifndef WITHOUT_ROWS
int nvmlDeviceGetRemappedRows(device which, unsigned *ce, unsigned *ue, unsigned *pending, unsigned *failure) {
    int ret = of(which, "rows");
    return ret ? ret : sscanf(found, "%u %u %u %u", ce, ue, pending, failure) == 4 ? 0 : 999;
}
#endif

#ifndef WITHOUT_SRAM
int nvmlDeviceGetSramEccErrorStatus(device which, sram_status *out) { return count(of(which, "sram"), &out->exceeded); }
#endif

int nvmlDeviceGetNvLinkState(device which, unsigned link, unsigned *active) {
    char key[32];
    snprintf(key, sizeof key, "link.%u", link);
    return count(of(which, key), active);
}

int nvmlDeviceGetNvLinkErrorCounter(device which, unsigned link, unsigned counter, unsigned long long *out) {
    char key[32];
    snprintf(key, sizeof key, "link.%u.%u", link, counter);
    return large(of(which, key), out);
}

#ifdef WITHOUT_EVENT_REASONS
int nvmlDeviceGetCurrentClocksThrottleReasons(device which, unsigned long long *out) { return large(of(which, "clocks"), out); }
#else
int nvmlDeviceGetCurrentClocksEventReasons(device which, unsigned long long *out) { return large(of(which, "clocks"), out); }
#endif

int nvmlDeviceGetFieldValues(device which, int number, field_value *values) {
    for (int i = 0; i < number; i++) {
        char key[32];
        snprintf(key, sizeof key, "field.%u", values[i].field);
        values[i].type = 1;
        values[i].ret = count(of(which, key), &values[i].value.u);
    }
    return 0;
}

int nvmlDeviceGetMigMode(device which, unsigned *now, unsigned *pending) { return two(which, "mig", now, pending); }
int nvmlDeviceGetMaxMigDeviceCount(device which, unsigned *out) { return count(of(which, "slices"), out); }

int nvmlDeviceGetMigDeviceHandleByIndex(device which, unsigned index, device *out) {
    *out = (device)((long)which * SLICE + index);
    int ret = of(*out, "uuid");
    return ret == NOT_SUPPORTED ? NOT_FOUND : ret;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device slice, device *out) {
    *out = (device)((long)slice / SLICE);
    return 0;
}
